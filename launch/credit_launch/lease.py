"""With hot spares a job outlives its first node, and with it the supervisor: the other nodes watch
the supervisor's heartbeat and queue the job again when it stops."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from credit_launch.files import AttemptFiles, publish

BEAT_S = 5.0
STAGGER_S = 10.0
"""Between the nodes' tries, so that they do not all queue it again."""


class Heartbeat:
    """The supervisor's sign of life."""

    def __init__(self, attempt: AttemptFiles) -> None:
        self._file = attempt.heartbeat
        self._last = 0.0

    def beat(self) -> None:
        """Writes it where it is due."""
        now = time.monotonic()
        if now - self._last >= BEAT_S:
            self._last = now
            publish(self._file, f"{time.time()}\n")


def watch(
    heartbeat: Path,
    *,
    patience_s: float,
    requeue: Callable[[], bool],
    poll_s: float = 1.0,
) -> None:
    """Returns after it queued the job again because the heartbeat did not change for so long.

    By this machine's own clock: those of the nodes may differ.
    """
    seen, since = "", time.monotonic()
    while True:
        now = _read(heartbeat)
        if now != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > patience_s and requeue():
            return
        time.sleep(poll_s)


def requeue_job(job: str) -> bool:
    """Asks Slurm; False where it refused."""
    found = subprocess.run(["scontrol", "requeue", job], stdin=subprocess.DEVNULL)
    return found.returncode == 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
