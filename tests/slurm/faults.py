"""What a fault cost: the rows of docs/faults.md, written by the tests that caused it."""

import fcntl
import json
import os
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

VARIABLE = "FAULT_TABLE"
"""Names the JSON file that rows are added to; no rows are kept without it."""


@dataclass(frozen=True)
class Fault:
    """One fault and what followed."""

    fault: str
    """What broke, in words."""
    tasks: str
    """`stand-in`, or `real`: the real trainer and engines."""
    detected_s: float | None
    """From the fault until the launcher or Slurm acted."""
    resumed_s: float | None
    """From the fault until the run went on; None where it must not."""
    steps_repeated: int | None = None
    """Steps that were done again."""
    rollouts_lost: int | None = None
    """Rollouts of the run's steps that are missing or there twice, at its end."""
    curve_equal: bool | None = None
    """Whether all metrics and rollouts are those of the undisturbed run, bit for bit."""
    outcome: str = ""
    """What became of the run."""


class FaultTable:
    """A file of faults; a row replaces the one of the same fault and tasks."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    @classmethod
    def from_environment(cls) -> "FaultTable":
        """The table that the variable names."""
        named = os.environ.get(VARIABLE)
        return cls(Path(named) if named else None)

    def add(self, fault: Fault) -> None:
        """Keep a row."""
        if self._path is None:
            return
        with locked(self._path.parent):
            rows = json.loads(self._path.read_text()) if self._path.exists() else []
            key = (fault.fault, fault.tasks)
            rows = [row for row in rows if (row["fault"], row["tasks"]) != key]
            rows.append({**asdict(fault), "measured": date.today().isoformat()})
            rows.sort(key=lambda row: (row["tasks"], row["fault"]))
            self._path.write_text(json.dumps(rows, indent=1) + "\n")


@contextmanager
def locked(directory: Path):
    """No other test, of this process or another, is in here meanwhile."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
