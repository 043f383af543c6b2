"""Runs one process of a local run and leaves nothing of it behind.

It stands between the supervisor and the task: when the task ends, when it is told to end, or when
the supervisor dies, however that happens, it ends everything that descends from the task.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from credit_launch.processes import (
    adopt_descendants,
    descendants,
    end_with_parent,
    signal_all,
)

POLL_S = 0.1


def keep(command: Sequence[str], *, grace_s: float) -> int:
    """The command's exit code, 128 + N where signal N ended it. Standard input must be a pipe whose
    other end the supervisor holds: its end is the supervisor's."""
    adopt_descendants()
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, _frame: asked.append(got))
    child = subprocess.Popen(
        list(command), stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=end_with_parent
    )
    deadline = None
    while child.poll() is None:
        if deadline is None and (asked or _is_orphan()):
            child.terminate()
            deadline = time.monotonic() + grace_s
        if deadline is not None and time.monotonic() > deadline:
            break
        if deadline is not None:
            time.sleep(POLL_S)
    end_all(grace_s=0 if child.poll() is None else min(grace_s, 2.0))
    code = child.wait()
    return code if code >= 0 else 128 - code


def end_all(*, grace_s: float) -> None:
    """Asks all descendants to end, then ends those that did not."""
    signal_all(descendants(os.getpid()), signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while _left() and time.monotonic() < deadline:
        time.sleep(POLL_S / 2)
    while _left():
        signal_all(descendants(os.getpid()), signal.SIGKILL)
        time.sleep(POLL_S / 2)


def _left() -> bool:
    """Whether anything runs below us."""
    return bool(descendants(os.getpid()))


def _is_orphan() -> bool:
    """Whether the supervisor is gone; waits a little for it."""
    readable, _, _ = select.select([sys.stdin.buffer], [], [], POLL_S)
    return bool(readable) and not os.read(sys.stdin.fileno(), 1)
