"""Processes of this machine: who descends from whom, and what runs."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)  # loading it between fork and exec could deadlock
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_descendants() -> None:
    """From now on, whoever loses its parent below us becomes our child (Linux)."""
    LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent() -> None:
    """Asks the kernel to end this process when its parent dies, however that happens (Linux)."""
    LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def descendants(ancestor: int) -> list[int]:
    """Processes below this one that have not ended."""
    parents = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            state, parent = _state_and_parent(path)
            if state not in ("Z", "X", ""):
                parents[int(path.name)] = parent
    found, level = [], {ancestor}
    while level:
        level = {child for child, parent in parents.items() if parent in level}
        found += sorted(level)
    return found


def is_alive(pid: int) -> bool:
    """Whether a process of this number runs here; one that nobody waited for does not."""
    return _state_and_parent(Path("/proc") / str(pid))[0] not in ("Z", "X", "")


def signal_all(pids: list[int], number: signal.Signals) -> None:
    """Signals those that are still there."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _state_and_parent(path: Path) -> tuple[str, int]:
    try:
        text = (path / "stat").read_text()
    except OSError:
        return "", 0
    # The name, in parentheses, may hold anything.
    state, parent = text[text.rindex(")") + 2 :].split()[:2]
    return state, int(parent)
