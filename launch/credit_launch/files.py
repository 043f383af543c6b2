"""Where the launcher keeps what it knows, in the run directory; readers never see half a file."""

from __future__ import annotations

import fcntl
import json
import os
import re
from pathlib import Path
from typing import IO, Any

ATTEMPT_NAME = re.compile(r"attempt-(\d+)")


def publish(path: Path, text: str) -> None:
    """Replaces the file's text at once."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def read_json(path: Path) -> dict[str, Any]:
    """What the file holds; empty where there is no such file or it holds no JSON object."""
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def hold_lock(path: Path) -> IO[str] | None:
    """An open file that holds the lock for as long as it is open; None where another process does.
    A file system without locks gives one that holds nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError:
        return file
    return file


def is_locked(path: Path) -> bool:
    """Whether another process holds the file's lock."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such file, or no locks on this file system
        return False
    return False


class AttemptFiles:
    """Files of one attempt."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.topology = root / "topology.json"
        self.stop = root / "STOP"
        self.stopped = root / "STOPPED"
        self.failure = root / "failure.json"
        self.engines = root / "engines"
        self.logs = root / "logs"
        self.checks = root / "checks"
        """Of the nodes before the start: the token, and what each node answers."""
        self.token = self.checks / "token"
        self.end = root / "end.json"
        self.heartbeat = root / "heartbeat"

    @property
    def number(self) -> int:
        """From 1."""
        match = ATTEMPT_NAME.fullmatch(self.root.name)
        assert match is not None
        return int(match[1])


class LaunchFiles:
    """Files of a launched run; with a `part`, those of one job of the rollout array."""

    def __init__(self, run: Path, part: str = "") -> None:
        self.run = run
        self.root = run / "launch"
        self.home = self.root / part if part else self.root
        self.plan = self.root / "plan.json"
        self.config = self.root / "config.json"
        self.script = self.root / "job.sbatch"
        self.rollout_script = self.root / "rollout.sbatch"
        self.package = self.root / "credit_launch.pyz"
        self.job = self.root / "job.json"
        self.progress = self.root / "progress"
        self.stop = self.root / "stop"
        self.stop_now = self.root / "stop-now"
        """The user does not want to wait for a checkpoint."""
        self.done = self.root / "DONE"
        self.status = self.home / "status.json"
        self.current = self.home / "current"
        self.latest = self.home / "latest"
        self.lock = self.home / "supervisor.lock"
        self.bad_nodes = self.home / "bad-nodes"
        self.successor = self.home / "successor"
        """Number of the job that took the place of this one of the rollout array."""

    def attempts(self) -> list[AttemptFiles]:
        """All attempts, the oldest first."""
        if not self.home.is_dir():
            return []
        found = [path for path in self.home.iterdir() if ATTEMPT_NAME.fullmatch(path.name)]
        return sorted(map(AttemptFiles, found), key=lambda attempt: attempt.number)

    def claim(self) -> AttemptFiles:
        """The next attempt, which no other supervisor has."""
        self.home.mkdir(parents=True, exist_ok=True)
        known = self.attempts()
        number = known[-1].number + 1 if known else 1
        while True:
            attempt = AttemptFiles(self.home / f"attempt-{number:03d}")
            try:
                attempt.root.mkdir()
            except FileExistsError:
                number += 1
                continue
            for path in (attempt.engines, attempt.logs, attempt.checks):
                path.mkdir()
            publish(self.current, f"{number}\n")
            self._point_latest(attempt)
            return attempt

    def is_current(self, attempt: AttemptFiles) -> bool:
        """Whether no later attempt has taken the run over."""
        try:
            return int(self.current.read_text()) <= attempt.number
        except (OSError, ValueError):
            return True  # not to be read just now

    def read_progress(self) -> int:
        """The newest complete checkpoint's step; -1 without one."""
        try:
            return int(self.progress.read_text())
        except (FileNotFoundError, ValueError):
            return -1

    def read_bad_nodes(self) -> list[str]:
        """Nodes that failed the checks of earlier attempts."""
        try:
            return self.bad_nodes.read_text().split()
        except FileNotFoundError:
            return []

    def jobs(self) -> list[str]:
        """Slurm's numbers of the run's jobs, those of engines last; some may be over."""
        main = read_json(self.job).get("job")
        return [*([str(main)] if main else []), *self.rollout_jobs()]

    def rollout_jobs(self) -> list[str]:
        """Slurm's numbers of the jobs that are not the trainer's."""
        array = read_json(self.job).get("rollout_job")
        successors = [path.read_text().strip() for path in self.successors()]
        return [*([str(array)] if array else []), *successors]

    def successors(self) -> list[Path]:
        """What names the jobs that took the place of one of the rollout array."""
        return sorted(self.root.glob(f"*/{self.successor.name}"))

    def _point_latest(self, attempt: AttemptFiles) -> None:
        link = self.home / f".latest.{os.getpid()}.tmp"
        link.unlink(missing_ok=True)
        link.symlink_to(attempt.root.name)
        os.replace(link, self.latest)
