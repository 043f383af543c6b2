"""Checkpoints of the training state: complete or absent, and refused where they do not belong.

A checkpoint is a directory of megatron's distributed format and a manifest that says whose it is
and what each file must be. All ranks must see the same file system. `saving` writes them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import StrictHandling

from megatron_credit.mcore.digests import readable, refuse_altered
from megatron_credit.mcore.exchange import broadcast_payload
from megatron_credit.mcore.manifest import read_manifest
from megatron_credit.mcore.training_state import TrainingState
from megatron_credit.mcore.vetting import check_pickles
from megatron_credit.mcore.writers import merged, writers_group


def load(directory: Path, state: TrainingState, identity: Mapping[str, str]) -> None:
    """Puts the state back as it was when it was saved, under any layout of the same model.

    Collective over the world. ValueError, on every rank and before anything is changed: not a
    checkpoint, another model, dtype or optimizer, a missing, cut or altered file, or a pickle that
    holds more than data.
    """
    answer = broadcast_payload(_examine(directory, identity) if dist.get_rank() == 0 else None)[0]
    if "problem" in answer:
        raise ValueError(answer["problem"])
    check_files(directory, answer["manifest"]["files"])
    loaded = dist_checkpointing.load(state.blank(), str(directory), strict=StrictHandling.RAISE_ALL)
    state.restore(loaded, answer["manifest"]["num_steps"])
    dist.barrier()


def check_files(directory: Path, files: Mapping[str, str]) -> None:
    """ValueError for a file that is not what the manifest says, or a pickle that holds more than
    data. Collective over the world: the ranks share the reading."""
    mine = sorted(files)[dist.get_rank() :: dist.get_world_size()]
    found = {name: readable(directory / name) for name in mine}
    refuse_altered(directory, files, merged(found, writers_group()))
    check_pickles(directory)


def _examine(directory: Path, identity: Mapping[str, str]) -> dict[str, Any]:
    """The manifest, or the problem with it; on one rank, so that all ranks decide alike."""
    try:
        return {"manifest": read_manifest(directory, identity)}
    except ValueError as error:
        return {"problem": str(error)}
