"""The child process of `conversion`: holds the model. Imported after `cpu_mode.enable()`."""

from collections.abc import Iterator
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_credit.mcore import checkpoint as checkpoints
from megatron_credit.mcore.architecture import read_architecture
from megatron_credit.mcore.config import OptimizerConfig, ParallelConfig, PolicyConfig
from megatron_credit.mcore.convert import Converter
from megatron_credit.mcore.hf_files import open_checkpoint, tensor_names, write_checkpoint
from megatron_credit.mcore.manifest import read_manifest
from megatron_credit.mcore.model import build_model
from megatron_credit.mcore.parallel import Ranks, start_parallel, stop_parallel
from megatron_credit.mcore.policy import DTYPES, NAMES, Policy
from megatron_credit.mcore.world import join_world

TIMEOUT_S = 600.0
_EXPORT_TYPES = {**DTYPES, "fp16": torch.float16}


def to_checkpoint(model: Path, checkpoint: Path, *, dtype: str, optimizer: str) -> None:
    """See `conversion.hf_to_checkpoint`."""
    if dtype == "auto":
        first = open_checkpoint(model)(tensor_names(model)[0])
        dtype = NAMES.get(first.dtype, "fp32")
    ranks = start_alone()
    policy = Policy.build(
        policy=PolicyConfig(model=model, dtype=dtype),
        optimizer=OptimizerConfig(kind=optimizer),
        parallel=ParallelConfig(),
        ranks=ranks,
        seed=0,
    )
    policy.save(checkpoint)
    stop_parallel()


def to_hf(checkpoint: Path, model: Path, output: Path, *, dtype: str) -> None:
    """See `conversion.checkpoint_to_hf`."""
    ranks = start_alone()
    architecture = read_architecture(model)
    stored = read_manifest(checkpoint, {})["identity"]["dtype"]
    chunks = build_model(architecture, ParallelConfig(), dtype=DTYPES[stored], seed=None)
    load_weights(checkpoint, chunks)
    weights = Converter(architecture, chunks, ranks).export()
    write_checkpoint(output, typed(weights, model, dtype), model)
    stop_parallel()


def start_alone() -> Ranks:
    """The only rank there is."""
    join_world(rank=0, size=1, rendezvous=None, timeout_s=TIMEOUT_S)
    return start_parallel(ParallelConfig(), seed=0, timeout_s=TIMEOUT_S)


@torch.no_grad()
def load_weights(directory: Path, chunks: list[GPTModel]) -> None:
    """Fills a model that one rank holds from a checkpoint of any layout; no optimizer is needed.

    ValueError as in `checkpoint.load`: a missing or altered file, or a pickle with more than data.
    """
    checkpoints.check_files(directory, read_manifest(directory, {})["files"])
    blank = {f"model{number}": chunk.sharded_state_dict() for number, chunk in enumerate(chunks)}
    # Whatever the model lacks in the checkpoint is an error; what it does not ask for is optimizer
    # state.
    loaded = dist_checkpointing.load(blank, str(directory), strict=StrictHandling.RAISE_UNEXPECTED)
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{number}"])


def typed(
    weights: Iterator[tuple[str, Tensor]], model: Path, dtype: str
) -> Iterator[tuple[str, Tensor]]:
    """The weights in the type asked for; `auto`: in that which each has in `model`."""
    original = None
    if dtype == "auto" and any(model.glob("*.safetensors")):
        original = open_checkpoint(model)
    for name, tensor in weights:
        if dtype != "auto":
            yield name, tensor.to(_EXPORT_TYPES[dtype])
        else:
            yield name, tensor if original is None else tensor.to(original(name).dtype)
