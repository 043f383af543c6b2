"""Between Hugging Face directories and training checkpoints, both ways, in one process.

Importing this module imports no megatron: a child process does the work.
"""

import os
from pathlib import Path
from typing import Literal

from megatron_credit.mcore import cpu_mode
from megatron_credit.mcore.architecture import read_architecture
from megatron_credit.mcore.hf_files import open_checkpoint
from megatron_credit.mcore.manifest import read_manifest
from megatron_credit.mcore.world import in_child

CheckpointType = Literal["auto", "fp32", "bf16"]
ExportType = Literal["auto", "fp32", "bf16", "fp16"]
FIRST = "step-000000"


def hf_to_checkpoint(
    model: Path, output: Path, *, dtype: CheckpointType = "auto", optimizer: str = "adam"
) -> Path:
    """`output`/step-000000, a checkpoint of this model before its first step.

    Going on from it is starting from `model`. `auto` is bf16 where the files are bf16, else fp32.
    ValueError, before anything is loaded or written: `model` cannot be read, the checkpoint exists,
    or nothing can be written there.
    """
    read_architecture(model)
    open_checkpoint(model)
    checkpoint = output / FIRST
    _check_new(checkpoint)
    in_child(_to_checkpoint, model.absolute(), checkpoint.absolute(), dtype, optimizer)
    return checkpoint


def checkpoint_to_hf(
    checkpoint: Path, model: Path, output: Path, *, dtype: ExportType = "auto"
) -> None:
    """Writes the weights of a checkpoint, of any layout, as a Hugging Face directory.

    `model` is the directory that the run started from: its configuration and tokenizer go along,
    and with `auto` each tensor gets the type that it has there (that of the checkpoint where
    `model` has no weights). ValueError, before anything is loaded or written: not a complete
    checkpoint, one of another model, `output` exists, or nothing can be written there.
    """
    architecture = read_architecture(model)
    manifest = read_manifest(checkpoint, {})
    if manifest["identity"]["architecture"] != architecture.fingerprint():
        raise ValueError(
            f"checkpoint {checkpoint} is not one of the model in {model}: their sizes or settings "
            "differ; give the directory that policy.model named in the run"
        )
    _check_new(output)
    in_child(_to_hf, checkpoint.absolute(), model.absolute(), output.absolute(), dtype)


def _to_checkpoint(model: Path, checkpoint: Path, dtype: str, optimizer: str) -> None:
    cpu_mode.enable()  # before anything imports megatron
    from megatron_credit.mcore import conversion_worker

    conversion_worker.to_checkpoint(model, checkpoint, dtype=dtype, optimizer=optimizer)


def _to_hf(checkpoint: Path, model: Path, output: Path, dtype: str) -> None:
    cpu_mode.enable()  # before anything imports megatron
    from megatron_credit.mcore import conversion_worker

    conversion_worker.to_hf(checkpoint, model, output, dtype=dtype)


def _check_new(path: Path) -> None:
    """ValueError where `path` exists or cannot be made."""
    if path.exists():
        raise ValueError(f"{path} exists already; name a directory that does not exist yet")
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise ValueError(f"{path} cannot be made: {above} is no directory that you may write to")
