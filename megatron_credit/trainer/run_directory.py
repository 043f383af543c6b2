"""Everything a run leaves behind, in one directory; safe against kills and against a second run."""

import fcntl
import json
import os
import re
import shutil
from pathlib import Path
from typing import IO, Any

CHECKPOINT_NAME = re.compile(r"step-(\d{6})")


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

    def prune_checkpoints(self, keep_last: int) -> None:
        """Deletes all but the newest `keep_last` checkpoints and what unfinished saves left."""
        steps = self.checkpoint_steps()
        keep = {self.checkpoint(step).name for step in steps[-keep_last:]}
        for path in self.checkpoints.iterdir():
            if path.name not in keep:
                shutil.rmtree(path)

    def rollout_file(self, step: int) -> Path:
        """The rollouts of `step`."""
        return self.rollouts / f"step-{step:06d}.jsonl"

    def write_data(self, data: dict[str, Any]) -> None:
        """Says which questions this run is about: their fingerprint and what was left out."""
        partial = self.data.with_suffix(".tmp")
        partial.write_text(json.dumps(data, indent=2))
        partial.replace(self.data)

    def read_data(self) -> dict[str, Any]:
        """What `write_data` wrote at the start of the run."""
        return json.loads(self.data.read_text())

    def write_status(self, status: dict[str, Any]) -> None:
        """Replaces the status that `progress` shows; readers never see half a file."""
        partial = self.status.with_suffix(".tmp")
        partial.write_text(json.dumps(status))
        partial.replace(self.status)

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
