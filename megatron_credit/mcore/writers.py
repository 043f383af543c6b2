"""The ranks as the writers of a checkpoint: a group of their own, and one outcome for all.

Training goes on over the other groups meanwhile, so nothing here may use those.
"""

import json
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

_TIMEOUT = timedelta(hours=2)
"""How long a rank waits for the slowest one's files."""
_UNWRITTEN = (
    "the checkpoint could not be written (rank {rank}: {reason}); it was taken away and earlier "
    "ones are as they were. Make room, or let the run write there, and start it again"
)
COMPLETE = (
    "the checkpoint is complete, but old ones could not be deleted, or the run's progress not "
    "be written down (rank {rank}: {reason}). Let the run do that, and start it again"
)


class SaveError(OSError):
    """A checkpoint that could not be written; `errno` and `filename` say why and which."""


def writers_group() -> dist.ProcessGroup:
    """All ranks over Gloo, made once a world. Collective over the world."""
    return _group_beside(dist.group.WORLD)


@cache
def _group_beside(_world: dist.ProcessGroup) -> dist.ProcessGroup:
    return dist.new_group(backend="gloo", timeout=_TIMEOUT)


def together(
    directory: Path,
    group: dist.ProcessGroup,
    action: Callable[[], None] | None = None,
    *,
    failed: str = _UNWRITTEN,
) -> None:
    """Every rank does its part, if any; SaveError on all of them where one could not, which says
    what `failed` and why."""
    try:
        if action is not None:
            action()
        problem = None
    except OSError as error:
        problem = [error.errno, _in_words(error)]
    for rank, found in enumerate(_gathered(problem, group)):
        if found is not None:
            number, reason = found
            raise SaveError(number, failed.format(rank=rank, reason=reason), str(directory))


def raise_cause(directory: Path, failure: CheckpointException) -> NoReturn:
    """SaveError for what torch's checkpoint found wrong on some rank, which it tells all ranks."""
    rank, (cause, _) = min(failure.failures.items())
    if isinstance(cause, OSError):
        words = _UNWRITTEN.format(rank=rank, reason=_in_words(cause))
        raise SaveError(cause.errno, words, str(directory)) from failure
    raise RuntimeError(f"checkpoint {directory} could not be written: {failure}") from failure


def _in_words(error: OSError) -> str:
    place = "" if error.filename is None else f": {error.filename}"
    return f"{error.strerror or error}{place}"


def _gathered(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """What every rank gave, as JSON, in the order of ranks."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    world = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(data)]), group=group)
    longest = int(max(sizes))
    texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(world)]
    padding = torch.zeros(longest - len(data), dtype=torch.uint8)
    dist.all_gather(texts, torch.cat([data, padding]), group=group)
    pairs = zip(texts, sizes, strict=True)
    return [json.loads(text[: int(size)].numpy().tobytes()) for text, size in pairs]


def merged(values: Mapping[str, str], group: dist.ProcessGroup) -> dict[str, str]:
    """The values of all ranks."""
    return {name: value for part in _gathered(values, group) for name, value in part.items()}
