"""Checkpoints of the training state: complete or absent, and refused where they do not belong.

A checkpoint is a directory of megatron's distributed format and a manifest that says whose it is
and what each file must be. All ranks must see the same file system.
"""

import json
import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed import checkpoint as torch_checkpoint

from megatron_credit.mcore.exchange import broadcast_payload, collective_device
from megatron_credit.mcore.manifest import MANIFEST, VERSION, read_manifest
from megatron_credit.mcore.training_state import TrainingState
from megatron_credit.mcore.vetting import check_pickles

_BLOCK = 1 << 24


def save(
    directory: Path, state: TrainingState, identity: Mapping[str, str], layout: Mapping[str, Any]
) -> None:
    """Writes the state; the directory appears, complete and on disk, when all ranks are done.

    Collective over the world. `identity` is what `load` must find again, `layout` is for people.
    ValueError, before anything is written, where the directory exists.
    """
    if _leader_says(directory.exists()):
        raise ValueError(f"{directory} exists already; a checkpoint is never overwritten")
    unfinished = directory.with_name(f".{directory.name}.unfinished")
    if dist.get_rank() == 0:
        # Left behind by processes that died while they wrote.
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(state.sharded(loading=False), str(unfinished), InProcessSave())
    files = _digests(unfinished, _leader_says(sorted(path.name for path in unfinished.iterdir())))
    if dist.get_rank() == 0:
        manifest = {
            "version": VERSION,
            "identity": dict(identity),
            "num_steps": state.num_steps,
            "layout": {"world_size": dist.get_world_size(), **layout},
            "files": files,
        }
        _write_durably(unfinished / MANIFEST, json.dumps(manifest, indent=2) + "\n")
        unfinished.rename(directory)
        _sync_directory(directory.parent)
    dist.barrier()


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
    loaded = dist_checkpointing.load(
        state.sharded(loading=True),
        str(directory),
        strict=StrictHandling.RAISE_ALL,
    )
    state.restore(loaded, answer["manifest"]["num_steps"])
    dist.barrier()


def check_files(directory: Path, files: Mapping[str, str]) -> None:
    """ValueError for a file that is not what the manifest says, or a pickle that holds more than
    data. Collective over the world."""
    found = _digests(directory, list(files))
    altered = [name for name in files if found[name] != files[name]]
    if altered:
        raise ValueError(
            f"checkpoint {directory} is damaged: {', '.join(altered)} is not what was written; "
            "use another checkpoint"
        )
    check_pickles(directory)


class InProcessSave(TorchDistSaveShardedStrategy):
    """Writes from the ranks themselves.

    megatron's own writer passes its results through a manager process even when it writes
    synchronously, and each rank waits seconds for that process to start.
    """

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path) -> None:
        """Each rank writes the main replicas that it holds to one file."""
        renamed, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        torch_checkpoint.save(
            mcore_to_pyt_state_dict(renamed, False),
            storage_writer=torch_checkpoint.FileSystemWriter(checkpoint_dir, sync_files=True),
            planner=MCoreSavePlanner(
                dedup_replicated_tensors=not self.keep_only_main_replica,
                flatten_state_dict=False,
                flatten_sharded_tensors=False,
            ),
        )


def _examine(directory: Path, identity: Mapping[str, str]) -> dict[str, Any]:
    """The manifest, or the problem with it; on one rank, so that all ranks decide alike."""
    try:
        return {"manifest": read_manifest(directory, identity)}
    except ValueError as error:
        return {"problem": str(error)}


def _leader_says(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    return broadcast_payload({"value": value} if dist.get_rank() == 0 else None)[0]["value"]


def _digests(directory: Path, names: list[str]) -> dict[str, str]:
    """Size and CRC-32 of each file, as text; the ranks share the reading."""
    found_F2 = torch.zeros(len(names), 2, dtype=torch.int64, device=collective_device())
    for number in range(dist.get_rank(), len(names), dist.get_world_size()):
        found_F2[number] = torch.tensor(_digest(directory / names[number]))
    dist.all_reduce(found_F2)
    pairs = zip(names, found_F2.tolist(), strict=True)
    return {name: f"{size} bytes, crc32 {crc:08x}" for name, (size, crc) in pairs}


def _digest(path: Path) -> tuple[int, int]:
    crc, size = 0, 0
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return size, crc


def _write_durably(path: Path, text: str) -> None:
    with path.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
