"""What the supervisor says: lines of the job's log, and the run's status."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from credit_launch.files import LaunchFiles, publish


class Journal:
    """Lines with time and attempt on standard output; status.json."""

    def __init__(self, status: Path, job: str | None) -> None:
        self._status = status
        self._job = job
        self.attempt = 0

    def say(self, *words: object) -> None:
        """One line."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        where = f"[{self._job or 'local'}.{self.attempt}]"
        sys.stdout.write(" ".join([stamp, where, *map(str, words)]) + "\n")
        sys.stdout.flush()

    def state(self, state: str, facts: Mapping[str, Any] | None = None, *, why: str = "") -> None:
        """The run's state from now on; `why` may have several lines."""
        record = {"state": state, "attempt": self.attempt, "job": self._job, "why": why}
        _write(self._status, {**record, **(facts or {})})
        self.say(state, f"({why})" if why else "")


def write_state(files: LaunchFiles, state: str, *, why: str = "") -> None:
    """The state of a run that no supervisor is at work on."""
    known = files.attempts()
    attempt = known[-1].number if known else 0
    _write(files.status, {"state": state, "attempt": attempt, "job": None, "why": why})


def _write(path: Path, record: Mapping[str, Any]) -> None:
    publish(path, json.dumps({**record, "time": time.time()}, indent=1) + "\n")
