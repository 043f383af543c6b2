"""Writes checkpoints, at once or while training goes on.

A save has two parts. The first runs with the training: the ranks gather what the optimizer splits
and copy what each of them writes to the CPU's memory. The second has that copy and a process group
to itself: files, digests, manifest and, when all ranks are done, the name.
"""

import json
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from megatron_credit.mcore.digests import digest
from megatron_credit.mcore.durable import sync_directory, write_durably
from megatron_credit.mcore.exchange import broadcast_payload, collective_device
from megatron_credit.mcore.manifest import MANIFEST, manifest_text, unfinished
from megatron_credit.mcore.training_state import TrainingState
from megatron_credit.mcore.vetting import INDEX
from megatron_credit.mcore.writers import (
    COMPLETE,
    merged,
    raise_cause,
    together,
    writers_group,
)

_FORMAT = CheckpointingConfig("torch_dist", 1)


@dataclass(frozen=True)
class SaveSeconds:
    """What a save took on this rank."""

    blocking: float
    """Training stood still: the wait for the save before, gathering, copying; all of it where
    the save was not asynchronous."""
    writing: float | None
    """From then until it was complete; None where it is not, or not asynchronous."""


class Saver:
    """Saves one state after the other. Every method is called by every rank."""

    def __init__(self) -> None:
        # A thread of an executor is waited for when the process ends by itself: what is being
        # written then is completed although the training failed.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[float] | None = None
        self._place: Path | None = None
        self._blocking_s: float | None = None
        self._writing_s: float | None = None
        self.saved: Path | None = None
        """The newest checkpoint that this rank knows to be complete."""

    def save(
        self,
        directory: Path,
        state: TrainingState,
        owner: Mapping[str, Any],
        *,
        asynchronous: bool = False,
        after: Callable[[], None] | None = None,
    ) -> None:
        """Begins, and unless asynchronous ends, to write the state as it is now.

        Waits for the save before, and raises as `finish` does for it. `owner`: the fields of the
        manifest that say whose the checkpoint is. `after` is called on rank 0, in the thread that
        writes, when the checkpoint is complete. ValueError, before anything is written, where the
        directory exists.
        """
        start = time.perf_counter()
        self.finish()
        group = writers_group()
        if _leader_says(directory.exists()):
            raise ValueError(f"{directory} exists already; a checkpoint is never overwritten")
        layout = {"world_size": dist.get_world_size(), **owner["layout"]}
        fields = {**owner, "layout": layout, "num_steps": state.num_steps}
        tensors = _staged(state, copied=asynchronous)
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        writing = _Writing(directory, tensors, fields, group, device, after)
        self._place = directory
        self._writing = self._thread.submit(writing.run)
        if not asynchronous:
            self.finish()
            self._writing_s = None
        self._blocking_s = time.perf_counter() - start

    def finish(self) -> None:
        """Returns when nothing is being written any more.

        SaveError, on every rank, where the last save failed: nothing of it is left.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            self._writing_s = writing.result()
            self.saved = self._place

    def poll(self) -> bool:
        """Whether nothing is being written any more; raises as `finish` does. Never waits for
        files, but it is collective over the world."""
        done = torch.tensor(
            [self._writing is None or self._writing.done()], device=collective_device()
        ).int()
        dist.all_reduce(done, op=dist.ReduceOp.MIN)
        if not done.item():
            return False
        self.finish()
        return True

    def take_seconds(self) -> SaveSeconds | None:
        """Of the newest save, once it needs no more of them; None before and after that."""
        blocking, writing = self._blocking_s, self._writing_s
        if blocking is None or self._writing is not None:
            return None
        self._blocking_s = self._writing_s = None
        return SaveSeconds(blocking, writing)


def _staged(state: TrainingState, *, copied: bool) -> dict[str, Any]:
    """What this rank writes, in torch's terms. Collective over the world."""
    kept, common = save_preprocess(state.written(copied=copied))
    kept["common_state"] = ShardedObject(
        "common_state", common, (1,), (0,), replica_id=dist.get_rank()
    )
    renamed, _, _ = _replace_state_dict_keys_with_sharded_keys(kept, keep_only_main_replica=True)
    return mcore_to_pyt_state_dict(renamed, is_loading=False)


@dataclass(frozen=True)
class _Writing:
    """One checkpoint from the staged state to its name."""

    directory: Path
    tensors: dict[str, Any]
    fields: dict[str, Any]
    group: dist.ProcessGroup
    device: int | None
    """The rank's own; a new thread would open device 0 on every rank."""
    after: Callable[[], None] | None

    def run(self) -> float:
        """Its seconds, when the checkpoint is complete and on disk; SaveError, and nothing is
        left of it, where it cannot be written. Collective over the group."""
        start = time.perf_counter()
        if self.device is not None:
            torch.cuda.set_device(self.device)
        complete = False
        try:
            self._together(self._begin)
            self._write_tensors()
            files = self._digests()
            self._together(lambda: self._end(files))
            complete = True
        finally:
            self.tensors.clear()
            if not complete and self._leads:
                shutil.rmtree(self._unfinished, ignore_errors=True)
        after = self.after if self._leads else None
        together(self.directory, self.group, after, failed=COMPLETE)
        return time.perf_counter() - start

    @property
    def _leads(self) -> bool:
        return dist.get_rank() == 0

    @property
    def _unfinished(self) -> Path:
        return unfinished(self.directory)

    def _together(self, action: Callable[[], None]) -> None:
        """Rank 0 acts, all ranks learn how it ended."""
        together(self.directory, self.group, action if self._leads else None)

    def _begin(self) -> None:
        # Left behind by processes that died while they wrote.
        shutil.rmtree(self._unfinished, ignore_errors=True)
        self._unfinished.mkdir(parents=True)

    def _write_tensors(self) -> None:
        """Each rank writes the main replicas that it holds to one file."""
        planner = MCoreSavePlanner(
            dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False
        )
        try:
            torch_checkpoint.save(
                self.tensors,
                storage_writer=_Writer(self._unfinished),
                planner=planner,
                process_group=self.group,
            )
        except torch_checkpoint.CheckpointException as failure:
            raise_cause(self.directory, failure)

    def _digests(self) -> dict[str, str]:
        """Of every file, by name; each rank reads what it wrote."""
        found: dict[str, str] = {}

        def read() -> None:
            mine = [f"__{dist.get_rank()}_0.distcp"]
            if self._leads:
                write_durably(self._unfinished / CONFIG_FNAME, json.dumps(asdict(_FORMAT)))
                mine += [INDEX, CONFIG_FNAME]
            found.update({name: digest(self._unfinished / name) for name in mine})

        together(self.directory, self.group, read)
        return merged(found, self.group)

    def _end(self, files: Mapping[str, str]) -> None:
        """The checkpoint gets its name, and lasts."""
        text = manifest_text({**self.fields, "files": dict(sorted(files.items()))})
        write_durably(self._unfinished / MANIFEST, text)
        sync_directory(self._unfinished)
        self._unfinished.rename(self.directory)
        sync_directory(self.directory.parent)


class _Writer(torch_checkpoint.FileSystemWriter):
    """Files that are on disk when they are written, and say why they cannot be."""

    def __init__(self, directory: Path) -> None:
        # Nothing is copied ahead: from another thread that would wait for the training's kernels.
        super().__init__(directory, sync_files=True, per_thread_copy_ahead=0)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """As the base, but for a full disk, which torch's writer of archives reports as an
        unexpected position."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise


def _leader_says(value: Any) -> Any:
    """Rank 0's value, on every rank of the world."""
    return broadcast_payload({"value": value} if dist.get_rank() == 0 else None)[0]["value"]
