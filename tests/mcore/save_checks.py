"""What both ranks do to saves: hold them back, fill the disk, break one rank's files."""

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mcore.parity_worker import OBJECTIVE, TEMPERATURE, make_batch

LEFT_FREE = 30_000
"""Bytes on the full disk: the directory can be made, the tensors cannot be written."""


def mount_small_disk(place: Path) -> bool:
    """Makes a file system of 8 MB there, if this user may."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "checkpoint-test", str(place)]
    return not subprocess.run(command, capture_output=True).returncode


@contextmanager
def held_back() -> Iterator[threading.Event]:
    """No file is written before the event is set."""
    from megatron_credit.mcore import saving

    gate, begin = threading.Event(), saving._Writing._begin

    def wait(writing: Any) -> None:
        assert gate.wait(120)
        begin(writing)

    saving._Writing._begin = wait
    try:
        yield gate
    finally:
        gate.set()
        saving._Writing._begin = begin


def save(policy: Any, path: Path, after: Callable[[], None] | None = None) -> None:
    """Begins to write a checkpoint."""
    state, owner = policy.training_state(), policy.owner("")
    policy.saver.save(path, state, owner, asynchronous=True, after=after)


def step(policy: Any) -> None:
    """Changes every weight."""
    batch = make_batch("mixed", policy.architecture.vocab_size)
    policy.update(batch, objective=OBJECTIVE, temperature=TEMPERATURE)


def on_all_ranks(value: Any) -> list[Any]:
    """What each rank found."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def failure(action: Callable[[], None]) -> tuple[int | None, str | None, str]:
    """How it ended: number, file and words of the error."""
    try:
        action()
    except OSError as error:
        return error.errno, error.filename, str(error)
    return None, None, "accepted"


def names(directory: Path) -> list[str]:
    dist.barrier()
    return sorted(path.name for path in directory.iterdir())


def run(root: Path, policy: Any) -> dict[str, Any]:
    """Everything that does not need a disk of its own."""
    place = root / "saves"
    return {
        "order": order(place / "order", policy),
        "rank": broken_rank(place / "rank", policy),
        "no_place": on_all_ranks(no_place(place / "order" / "one" / "manifest.json", policy)),
    } | ({"full": full_disk(root / "full", policy)} if os.path.ismount(root / "full") else {})


def order(place: Path, policy: Any) -> dict[str, Any]:
    """A save waits for the one before; what follows it is done on one rank, after its name."""
    followed: list[bool] = []
    with held_back() as gate:
        save(policy, place / "one", after=lambda: followed.append((place / "one").is_dir()))
        busy = [policy.saver.poll(), (place / "one").exists(), policy.saver.saved]
        waiting = threading.Timer(0.3, gate.set)
        waiting.start()
        save(policy, place / "two")
        found = {"busy": busy, "one": (place / "one").is_dir(), "saved": policy.saver.saved.name}
    policy.saver.finish()
    seconds, taken = policy.saver.take_seconds(), policy.saver.take_seconds()
    save(policy, place / "three", after=lambda: (place / "absent").rmdir())
    after = on_all_ranks(failure(policy.saver.finish))
    return {
        **found,
        "after": after,
        "idle": policy.saver.poll(),
        "followed": on_all_ranks(followed),
        "names": names(place),
        "waited": seconds.blocking >= 0.25 and seconds.writing > 0,
        "taken": taken,
    }


def broken_rank(place: Path, policy: Any) -> dict[str, Any]:
    """One rank may not write: every rank hears of it, from the next save."""
    from megatron_credit.mcore import saving

    write = saving._Writer.write_data

    def refuse(_writer: Any, *_arguments: Any) -> None:
        raise PermissionError(13, "Permission denied", "__1_0.distcp")

    if dist.get_rank() == 1:
        saving._Writer.write_data = refuse
    save(policy, place / "one")
    step(policy)
    errors = on_all_ranks(failure(lambda: save(policy, place / "two")))
    saving._Writer.write_data = write
    left = names(place)
    save(policy, place / "one")
    policy.saver.finish()
    return {"errors": errors, "left": left, "then": names(place)}


def no_place(file: Path, policy: Any) -> tuple[int | None, str | None, str]:
    """There is a file where a directory is needed."""
    return failure(lambda: policy.save(file / "step-000001"))


def full_disk(place: Path, policy: Any) -> dict[str, Any]:
    """A disk that fills up while a checkpoint is written, at once or meanwhile."""
    policy.save(place / "one")
    kept = weights(policy)
    if dist.get_rank() == 0:
        status = os.statvfs(place)
        with (place / "filler").open("w") as filler:
            os.posix_fallocate(filler.fileno(), 0, status.f_bavail * status.f_bsize - LEFT_FREE)
    step(policy)
    dist.barrier()
    save(policy, place / "two")
    step(policy)
    later = on_all_ranks(failure(policy.saver.finish))
    at_once = on_all_ranks(failure(lambda: policy.save(place / "three")))
    left = names(place)
    policy.load(place / "one")
    same = all(map(torch.equal, kept, weights(policy)))
    if dist.get_rank() == 0:
        (place / "filler").unlink()
    dist.barrier()
    policy.save(place / "two")
    found = {"later": later, "at_once": at_once, "left": left, "then": names(place)}
    return found | {"intact": on_all_ranks(same)}


def weights(policy: Any) -> list[torch.Tensor]:
    return [one.detach().clone() for chunk in policy.chunks for one in chunk.parameters()]
