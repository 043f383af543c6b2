"""Watches the running tasks until the attempt is over."""

from __future__ import annotations

import time

from credit_launch.crew import POLL_S, Crew
from credit_launch.endings import TOO_SLOW, Outcome
from credit_launch.failures import end_of_log, failure_of
from credit_launch.files import read_json
from credit_launch.plan import LEADER
from credit_launch.scene import Scene

RESERVE_S = 20.0
"""Before the time limit: what queueing again takes."""
DONE_S = 120.0
"""How long the trainer may take to end once it said that the run is done."""
SETTLE_S = 3.0
"""A job that is ended from outside may lose its steps before its supervisor hears of it."""


class Watch:
    """Of one attempt."""

    def __init__(self, scene: Scene, crew: Crew) -> None:
        self._scene = scene
        self._crew = crew
        self._is_told = False
        self._last_moment: float | None = None
        self._done_since: float | None = None

    def until_end(self) -> Outcome:
        """How the attempt ended; what still runs is to be ended."""
        while True:
            self._scene.look_up()
            outcome = self._listen() or self._look()
            if outcome is not None:
                return outcome
            time.sleep(POLL_S)

    def _listen(self) -> Outcome | None:
        """Does what was asked for; the outcome where that is over at once."""
        scene, requests = self._scene, self._scene.requests
        if requests.anything and not self._is_told:
            self._is_told = True
            self._tell_stop()
        if requests.at_once:
            return Outcome(was_stopped=True, reason="without waiting for a checkpoint")
        if scene.part and requests.anything:
            # Engines have nothing to save.
            return Outcome(was_terminated=requests.terminated, was_warned=True, has_saved=True)
        if requests.warned and self._last_moment is None:
            self._last_moment = self._find_last_moment()
        if self._last_moment is not None and time.monotonic() > self._last_moment:
            warn = scene.plan.limits.warn_seconds
            return Outcome(was_warned=True, reason=TOO_SLOW.format(warn=warn))
        return None

    def _look(self) -> Outcome | None:
        """The outcome where the tasks have come to an end."""
        scene = self._scene
        if self._crew.leader_code() is not None:
            return self._trainer_ended()
        if scene.part and self._run_is_over():
            return Outcome(is_done=True)
        if scene.run.done.exists():
            self._done_since = self._done_since or time.monotonic()
            is_late = time.monotonic() > self._done_since + DONE_S
            return Outcome(is_done=True) if is_late else None
        if scene.requests.terminated:
            return None
        why = self._crew.replace_ended()
        return self._failed(why) if why else None

    def _trainer_ended(self) -> Outcome:
        scene, requests = self._scene, self._scene.requests
        has_saved = scene.attempt.stopped.exists()
        as_asked = has_saved and requests.anything
        if scene.run.done.exists():
            return Outcome(is_done=True)
        if self._is_ended_from_outside(wait=not as_asked):
            return Outcome(
                was_stopped=requests.wants_stop, was_terminated=True, has_saved=has_saved
            )
        if as_asked:
            return Outcome(was_stopped=requests.wants_stop, was_warned=True, has_saved=True)
        outcome = self._failed(f"the trainer ended, and the run is not done; {self._trainer_log()}")
        if requests.wants_stop:
            return Outcome(was_stopped=True, reason=f"it had not saved: {outcome.reason}")
        return outcome

    def _trainer_log(self) -> str:
        nodes = self._crew.topology.tasks[LEADER].nodes
        logs = self._scene.attempt.logs
        return end_of_log([logs / f"{LEADER}.{node.name}.log" for node in nodes])

    def _is_ended_from_outside(self, *, wait: bool) -> bool:
        """Whether Slurm ends the job: to queue it again would bring a cancelled one back."""
        cluster, requests = self._scene.cluster, self._scene.requests
        deadline = time.monotonic() + (SETTLE_S if wait and cluster.job else 0)
        while time.monotonic() < deadline and not requests.terminated:
            self._scene.look_up()
            time.sleep(POLL_S)
        return requests.terminated or cluster.is_ending()

    def _failed(self, why: str) -> Outcome:
        known = failure_of(self._scene.attempt)
        reason, may_retry = known if known is not None else (why, True)
        return Outcome(was_warned=self._scene.requests.warned, reason=reason, may_retry=may_retry)

    def _tell_stop(self) -> None:
        """The trainer saves at the next boundary of a step and ends."""
        scene, requests = self._scene, self._scene.requests
        reasons = [
            *(["the user asked for it"] if requests.wants_stop else []),
            *(["the time limit is near"] if requests.warned else []),
            *(["SIGTERM"] if requests.terminated else []),
        ]
        scene.attempt.stop.touch()
        scene.journal.state("stopping", why=", ".join(reasons))

    def _find_last_moment(self) -> float:
        """When the job must be queued again at the latest, by our clock."""
        warn = self._scene.plan.limits.warn_seconds
        try:
            left = self._scene.cluster.seconds_left()
        except RuntimeError as error:
            self._scene.journal.say(error)
            left = None
        left = warn if left is None else left
        return time.monotonic() + max(0.0, left - min(RESERVE_S, warn / 2))

    def _run_is_over(self) -> bool:
        """For a job of the rollout array: whether the trainer needs no engines any more."""
        state = read_json(self._scene.run.root / "status.json").get("state")
        return self._scene.run.done.exists() or state in ("stopped", "gave-up")
