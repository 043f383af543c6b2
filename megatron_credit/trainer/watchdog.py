"""Ends a run that hangs, and says which rank stands where.

A collective that waits for a rank that never comes waits for long, on all ranks, and its error then
names ranks that did nothing wrong. Each rank therefore tells a store what it is doing, and one that
has made no progress for too long compares what the others said.
"""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from megatron_credit.mcore.progress_board import Progress

HANG_EXIT_CODE = 70
BEATS_OF_A_TIMEOUT = 8
LONGEST_BEAT_S = 5.0
SILENT_BEATS = 3
"""A rank that says nothing for as many beats does not run."""


class Board(Protocol):
    """What ranks say of themselves."""

    def publish(self, progress: Progress) -> None:
        """Replaces what this rank has said."""
        ...

    def read(self) -> dict[int, Progress]:
        """What all ranks have said last."""
        ...


class Watchdog:
    """A thread that says how far this rank is, and calls `on_hang` with the reason when it has made
    no progress for `timeout_s`; before its first phase, for `start_timeout_s`."""

    def __init__(
        self,
        board: Board,
        *,
        rank: int,
        world_size: int,
        node: str,
        timeout_s: float,
        start_timeout_s: float,
        on_hang: Callable[[str, str], None],
    ) -> None:
        self._board = board
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._limit_s = start_timeout_s
        self._beat_s = min(LONGEST_BEAT_S, timeout_s / BEATS_OF_A_TIMEOUT)
        self._on_hang = on_hang
        self._progress = Progress(rank=rank, count=0, step=0, phase="start", node=node)
        self._since = time.monotonic()
        self._ended = threading.Event()
        self._news = threading.Event()
        """There is something to say before the next beat."""
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def enter(self, step: int, phase: str) -> None:
        """This rank begins a phase."""
        count = self._progress.count + 1
        self._progress = replace(self._progress, count=count, step=step, phase=phase)
        self._since = time.monotonic()
        self._limit_s = self._timeout_s
        self._news.set()

    @property
    def phase(self) -> str:
        """What this rank is doing."""
        return self._progress.phase

    def close(self) -> None:
        """The run is over."""
        self._ended.set()
        self._news.set()
        self._thread.join()

    def _watch(self) -> None:
        try:
            while self._beat():
                if self._late_s() > self._limit_s:
                    self._judge()
        except RuntimeError:
            # The store went with the first node's agent; whatever ended it ends this rank too.
            return

    def _judge(self) -> None:
        """Says who is to blame, unless this rank went on after all."""
        before = self._board.read()
        until = time.monotonic() + SILENT_BEATS * self._beat_s
        while time.monotonic() < until:
            if not self._beat():
                return
        late_s = self._late_s()
        if late_s > self._limit_s:
            reason = describe_hang(before, self._board.read(), self._world_size, late_s)
            self._on_hang(reason, self._progress.phase)
            self._ended.set()

    def _beat(self) -> bool:
        """Says where this rank is, after a while or as soon as it goes on; False where the run is
        over."""
        self._news.wait(self._beat_s)
        self._news.clear()
        if self._ended.is_set():
            return False
        self._board.publish(self._progress)
        return True

    def _late_s(self) -> float:
        return time.monotonic() - self._since


def describe_hang(
    before: dict[int, Progress], after: dict[int, Progress], world_size: int, late_s: float
) -> str:
    """Which ranks the others wait for, in words, from what the ranks said at two times.

    Those that said nothing new (stopped, or their node is gone), else those that are behind, else
    all of them.
    """
    head = f"no progress for {late_s:.0f} s: "
    missing = [rank for rank in range(world_size) if rank not in after]
    if missing:
        return f"{head}{ranks(missing)} never came as far as the first phase"
    furthest = max(one.count for one in after.values())
    ahead = next(one for one in after.values() if one.count == furthest)
    silent = [one for rank, one in after.items() if before.get(rank) == one]
    if silent:
        return f"{head}{where(silent)}, silent; {where([ahead])}"
    behind = [one for one in after.values() if one.count < furthest]
    if behind:
        return f"{head}{where(behind)}; {where([ahead])}"
    return f"{head}all {world_size} ranks stand in {ahead.phase} of step {ahead.step}"


def where(some: Sequence[Progress]) -> str:
    """`rank 3 (node n2) stands in train of step 5`, for the first of several."""
    first = some[0]
    nodes = sorted({one.node for one in some})
    verb = "stands" if len(some) == 1 else "stand"
    named = ranks([one.rank for one in some])
    return f"{named} (node {', '.join(nodes)}) {verb} in {first.phase} of step {first.step}"


def ranks(numbers: Sequence[int]) -> str:
    """The numbers in words; many are cut."""
    shown = ", ".join(map(str, numbers[:8])) + (" .." if len(numbers) > 8 else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}"


def end_process(reason: str) -> None:
    """Writes the reason and where every thread stands to the log, and ends this process, whose main
    thread waits in a call that nothing can interrupt."""
    sys.stderr.write(f"watchdog: {reason}\n")
    sys.stderr.flush()
    faulthandler.dump_traceback(all_threads=True)
    os._exit(HANG_EXIT_CODE)
