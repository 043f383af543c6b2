"""What follows from how an attempt ended."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from credit_launch.files import AttemptFiles, LaunchFiles, publish, read_json
from credit_launch.plan import Limits

TERMINATED = 143
"""Exit code after SIGTERM, as a shell has it."""
FAILED = 1
TOO_SLOW = (
    "the trainer had not stopped when the time was nearly over: a step and its checkpoint took "
    "longer than launch.warn_seconds = {warn}; raise it"
)


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended."""

    is_done: bool = False
    """The trainer's leader said so."""
    was_stopped: bool = False
    """The user asked for it."""
    was_terminated: bool = False
    """SIGTERM came: cancelled, preempted, a node lost, time over."""
    has_saved: bool = False
    """The trainer saved because it was told to stop."""
    was_warned: bool = False
    """The time limit is near."""
    reason: str = ""
    """Of a failure."""
    may_retry: bool = True
    """Whether the failure may be gone next time."""
    bad_nodes: tuple[str, ...] = ()
    """Nodes that the next attempt must not use."""

    @property
    def counts(self) -> bool:
        """Whether it says something about the run: not where Slurm ended it or a node was bad."""
        return not (self.was_terminated or self.bad_nodes)

    @property
    def is_failure(self) -> bool:
        """Whether something went wrong."""
        wanted = self.was_warned and self.has_saved
        return not (self.is_done or self.was_stopped or self.was_terminated or wanted)


@dataclass(frozen=True)
class Ending:
    """What the supervisor does now."""

    state: str
    """Of status.json."""
    why: str
    code: int
    """Its exit code, where nothing follows."""
    again: bool = False
    """Another attempt follows."""


@dataclass(frozen=True)
class History:
    """What earlier attempts and this one mean together."""

    num_attempts: int
    """Of this launch, this one included."""
    num_fruitless: int
    """Failed attempts in a row without a new checkpoint, this one included."""


def decide(outcome: Outcome, history: History, limits: Limits) -> Ending:
    """What follows."""
    if outcome.is_done:
        return Ending("done", "", 0)
    if outcome.was_stopped:
        why = "asked by the user" + (f"; {outcome.reason}" if outcome.reason else "")
        return Ending("stopped", why, 0)
    if outcome.was_terminated:
        # Slurm queues again what it should; to do so here would bring cancelled jobs back.
        return Ending("stopping", "ended by Slurm or a signal (SIGTERM)", TERMINATED)
    why = outcome.reason or "time limit near, saved"
    if outcome.is_failure and not outcome.may_retry:
        return Ending("gave-up", why, FAILED)
    if outcome.is_failure and history.num_fruitless >= limits.max_no_progress:
        return Ending(
            "gave-up",
            f"{history.num_fruitless} failed attempts in a row without a new checkpoint "
            f"(launch.max_no_progress = {limits.max_no_progress}); the last one: {why}",
            FAILED,
        )
    if history.num_attempts >= limits.max_attempts:
        return Ending(
            "gave-up",
            f"{history.num_attempts} attempts (launch.max_attempts = {limits.max_attempts}); the "
            f"last one: {why}",
            FAILED,
        )
    return Ending("requeued", why, 0, again=True)


def record_end(
    attempt: AttemptFiles, outcome: Outcome, ending: Ending, *, before: int, after: int
) -> None:
    """Writes how the attempt ended, for later ones; `before` and `after` are checkpoints' steps."""
    record = {
        "state": ending.state,
        "why": ending.why,
        "failed": outcome.is_failure,
        "counts": outcome.counts,
        "before": before,
        "after": after,
        "time": time.time(),
    }
    publish(attempt.end, json.dumps(record, indent=1) + "\n")


def history_of(
    files: LaunchFiles, outcome: Outcome, *, first: int, before: int, after: int
) -> History:
    """What the attempts since `first` and the outcome of the newest mean together.

    Attempts that Slurm ended, or that ended without a word, count neither way.
    """
    attempts = [attempt for attempt in files.attempts() if attempt.number >= first]
    fruitless = 0
    if outcome.is_failure and outcome.counts and after <= before:
        fruitless = 1 + _fruitless_before(attempts[:-1])
    return History(len(attempts), fruitless)


def num_bad_nodes_before(attempts: Sequence[AttemptFiles]) -> int:
    """How many of the last attempts in a row ended because of bad nodes."""
    ends = (read_json(attempt.end) for attempt in reversed(attempts))
    return len(list(itertools.takewhile(_blames_nodes, ends)))


def _blames_nodes(end: Mapping[str, Any]) -> bool:
    return bool(end) and end["failed"] and not end["counts"]


def _fruitless_before(attempts: Sequence[AttemptFiles]) -> int:
    count = 0
    for attempt in reversed(attempts):
        end = read_json(attempt.end)
        if not end or not end["counts"]:
            continue
        if not end["failed"] or end["after"] > end["before"]:
            break
        count += 1
    return count
