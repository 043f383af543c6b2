"""Everything a run leaves behind, in one directory; safe against kills and against a second run."""

import fcntl
import json
import os
import re
import shutil
from pathlib import Path
from typing import IO, Any

from megatron_credit.errors import writing
from megatron_credit.trainer.config import CheckpointSection

CHECKPOINT_NAME = re.compile(r"step-(\d{6})")
ROLLOUT_NAME = re.compile(r"step-(\d{6})\.(jsonl|tmp)")
REMAINS = re.compile(r"\.step-\d{6}\.(unfinished|deleted)")
"""What a save or a deletion leaves that did not come to its end."""


class RunDirectory:
    """Paths of a run and the small files that describe its state."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.config = self.root / "config.json"
        self.metrics = self.root / "metrics.jsonl"
        self.status = self.root / "status.json"
        self.data = self.root / "data.json"
        self.logs = self.root / "logs"
        self.rollouts = self.root / "rollouts"
        self.checkpoints = self.root / "checkpoints"
        self.launch = self.root / "launch"
        self.model = self.root / "model"
        self.curve = self.root / "curve.png"

    def create(self) -> None:
        """Makes the directories; raises ValueError where that is not possible."""
        try:
            for path in (self.root, self.logs, self.rollouts, self.checkpoints):
                path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"run.directory={self.root} cannot be created ({error.strerror}); name a directory "
                "that you may write to"
            ) from None

    def lock(self) -> IO[str]:
        """An open file that keeps a second run out of the directory for as long as it is open.

        Child processes that inherit it keep the lock when their parent is killed, so that a new run
        cannot start beside their remains. Raises ValueError when another run holds it.
        """
        return lock_directory(self.root, otherwise="set run.directory to another place")

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint after `step` stands."""
        return self.checkpoints / f"step-{step:06d}"

    def checkpoint_steps(self) -> list[int]:
        """Steps of all complete checkpoints, ascending; unfinished ones have other names."""
        if not self.checkpoints.is_dir():
            return []
        found = (CHECKPOINT_NAME.fullmatch(path.name) for path in self.checkpoints.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def completed(self, step: int, kept: CheckpointSection) -> None:
        """What follows a checkpoint that is complete: the supervisor hears of it, old ones go."""
        self.write_progress(step)
        self.prune_checkpoints(kept.keep_last, kept.keep_every)

    def prune_checkpoints(self, keep_last: int, keep_every: int = 0) -> None:
        """Deletes all but the newest `keep_last` checkpoints and those of a multiple of
        `keep_every`, and what unfinished saves and deletions left.

        Whatever has another name, such as a damaged one that was set aside, stays. None may be
        being written meanwhile.
        """
        steps = self.checkpoint_steps()
        for step in steps[:-keep_last]:
            if not keep_every or step % keep_every:
                # A deletion that is cut short must not leave something like a checkpoint.
                path = self.checkpoint(step)
                path.rename(path.with_name(f".{path.name}.deleted"))
        for path in self.checkpoints.iterdir():
            if REMAINS.fullmatch(path.name):
                shutil.rmtree(path)

    def set_aside(self, checkpoint: Path) -> Path:
        """The new place, beside the old, of a checkpoint that is never to be gone on from."""
        number, place = 1, checkpoint.with_name(f"{checkpoint.name}.damaged")
        while place.exists():
            number += 1
            place = checkpoint.with_name(f"{checkpoint.name}.damaged-{number}")
        checkpoint.rename(place)
        return place

    def write_progress(self, step: int) -> None:
        """Tells the supervisor of a launched run which checkpoint is the newest complete one."""
        if self.launch.is_dir():
            replace_text(self.launch / "progress", str(step))

    def keep_rollouts(self, *, last_step: int) -> None:
        """Deletes the rollouts of later steps, which a resumed run samples again."""
        for path in self.rollouts.iterdir() if self.rollouts.is_dir() else ():
            match = ROLLOUT_NAME.fullmatch(path.name)
            if match and int(match[1]) > last_step:
                path.unlink()

    def rollout_file(self, step: int) -> Path:
        """The rollouts of `step`."""
        return self.rollouts / f"step-{step:06d}.jsonl"

    def write_data(self, data: dict[str, Any]) -> None:
        """Says which questions this run is about: their fingerprint and what was left out."""
        replace_text(self.data, json.dumps(data, indent=2))

    def read_data(self) -> dict[str, Any]:
        """What `write_data` wrote at the start of the run."""
        return json.loads(self.data.read_text())

    def write_status(self, status: dict[str, Any]) -> None:
        """Replaces the status that `progress` shows; readers never see half a file."""
        replace_text(self.status, json.dumps(status))

    def read_status(self) -> dict[str, Any]:
        """The latest status; empty before the first."""
        try:
            return json.loads(self.status.read_text())
        except FileNotFoundError:
            return {}


def checkpoint_step(path: Path) -> int:
    """The step of a checkpoint directory named `step-000123`; ValueError for other names."""
    match = CHECKPOINT_NAME.fullmatch(path.name)
    if match is None or not path.is_dir():
        raise ValueError(
            f"run.resume={path} is not a checkpoint directory; expected an existing directory "
            "named like step-000020"
        )
    return int(match[1])


def replace_text(path: Path, text: str) -> None:
    """The file has this text; whoever reads it meanwhile finds the old one or the new one."""
    partial = path.with_suffix(".tmp")
    with writing(partial):
        partial.write_text(text)
    partial.replace(path)


def lock_directory(directory: Path, *, otherwise: str) -> IO[str]:
    """An open file that keeps others out of the directory for as long as it is open.

    ValueError where another process holds it; `otherwise` says what to do instead of waiting.
    """
    handle = (directory / "lock").open("a+")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.seek(0)
        owner = handle.read().strip() or "unknown"
        handle.close()
        raise ValueError(
            f"another run (process {owner}) is at work in {directory}; wait for it, stop it, or "
            f"{otherwise}"
        ) from None
    handle.truncate(0)
    handle.write(str(os.getpid()))
    handle.flush()
    return handle
