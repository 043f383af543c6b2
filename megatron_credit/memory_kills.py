"""Processes that the kernel ended because memory was short (Linux); light to import.

Nothing else tells such an end from another by SIGKILL: the log of the kernel is root's.
"""

import time
from pathlib import Path

VMSTAT = Path("/proc/vmstat")
RECENT_S = 10.0


class MemoryKills:
    """What was killed lately, for whoever calls `look` now and then."""

    def __init__(self) -> None:
        self._before = self._last = num_killed()
        self._looked = time.monotonic()

    def look(self) -> None:
        """Forgets what is older than one or two `RECENT_S`."""
        now = time.monotonic()
        if now - self._looked >= RECENT_S:
            self._before, self._last, self._looked = self._last, num_killed(), now

    def just_now(self) -> str:
        """What was killed since then, in words; empty: nothing."""
        killed = num_killed() - self._before
        if killed <= 0:
            return ""
        what = "a process" if killed == 1 else f"{killed} processes"
        return f"the kernel ended {what} of this machine for lack of memory just now"


def num_killed() -> int:
    """Processes of this machine since it started, by its own limit or a cgroup's; 0 where the
    kernel does not say."""
    try:
        lines = VMSTAT.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
