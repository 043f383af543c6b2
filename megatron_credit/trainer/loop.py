"""The training loop: the same program on every rank, no method named."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from megatron_credit.batch.scored import Scored, Update
from megatron_credit.batch.sequence import TrainSequence
from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.credit_stage import Credited, Part
from megatron_credit.trainer.experience import Experience
from megatron_credit.trainer.signals.step import Note

STEP_PHASES = ("rollout", "signals", "train", "sync")


class Policy(Protocol):
    """What the loop asks of the model being trained; collective on all ranks."""

    def update(self, part: Part) -> Update:
        """One optimizer step; its metrics and what it found of each token."""
        ...

    def save(self, step: int) -> None:
        """Begins to write the checkpoint after `step`; it may be complete later."""
        ...

    def poll_save(self) -> bool:
        """Whether no checkpoint is being written; raises what went wrong. Never waits for files."""
        ...

    def save_metrics(self) -> dict[str, float]:
        """What the newest save took, once, when `poll_save` found it complete."""
        ...

    def finish_save(self) -> None:
        """Returns when the checkpoint under way is complete."""
        ...


class Credit(Protocol):
    """What the loop asks of the credit method; collective on all ranks."""

    def assign(self, step: int, experience: Experience) -> Credited:
        """The rollouts with an advantage for each token, a part for each optimizer step."""
        ...


class Rollouts(Protocol):
    """What the loop asks of the engines; collective on all ranks."""

    def collect(self, step: int) -> tuple[Experience, dict[str, float]]:
        """The graded rollouts of a step, the same on every rank."""
        ...

    def keep(
        self,
        step: int,
        sequences: list[TrainSequence],
        scored: list[Scored],
        notes: list[Note],
    ) -> None:
        """Writes the step's rollouts down with the credit that their tokens got."""
        ...

    def load_weights(self, step: int) -> dict[str, float]:
        """Gives the engines the policy's weights as they are after `step`."""
        ...

    def evaluate(self) -> dict[str, float]:
        """Accuracy on held-out prompts; empty on the ranks that do not know."""
        ...


class Recorder(Protocol):
    """Where metrics and progress go; silent on all ranks but one."""

    def phase(self, step: int, name: str) -> None:
        """A phase of a step begins."""
        ...

    def record(self, step: int, metrics: dict[str, float]) -> None:
        """The step is over; its metrics are on disk when this returns."""
        ...


class Stop(Protocol):
    """Whether somebody wants the run to end early; collective on all ranks."""

    def requested(self) -> bool:
        """The same answer on every rank."""
        ...

    def stopped(self, step: int) -> None:
        """The run ends early; its newest checkpoint is that of `step`."""
        ...


@dataclass
class Stopwatch:
    """Seconds spent in each phase of one step."""

    step: int
    recorder: Recorder
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times the block under the phase's name and announces it."""
        self.recorder.phase(self.step, name)
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def metrics(self, num_tokens: float) -> dict[str, float]:
        """Seconds of the phases and of the step (rollout to sync), and its token rate."""
        times = {f"timing/{name}_s": value for name, value in self.seconds.items()}
        step_s = sum(self.seconds.get(name, 0.0) for name in STEP_PHASES)
        rate = num_tokens / step_s if step_s else 0.0
        return times | {"timing/step_s": step_s, "perf/tokens_per_s": rate}


@dataclass(frozen=True)
class Trainer:
    """A run, from the step after `last_step` to the last."""

    config: RunConfig
    policy: Policy
    credit: Credit
    rollouts: Rollouts
    recorder: Recorder
    stop: Stop
    last_step: int

    def run(self) -> bool:
        """Trains; every step ends with its metrics on disk and, where due, a checkpoint.

        False: it was asked to stop, and did behind a step whose checkpoint is complete.
        """
        self.rollouts.load_weights(self.last_step)
        if self.last_step == 0:
            self._start()
        saved = self.last_step
        for step in range(self.last_step + 1, self.config.trainer.steps + 1):
            if self.stop.requested():
                self._halt(step - 1, saved)
                return False
            self._step(step)
            if step == self.config.trainer.steps or self._due(step, self.config.checkpoint.every):
                self._save(step)
                saved = step
        self.recorder.phase(self.config.trainer.steps, "checkpoint")
        self.policy.finish_save()
        return True

    def _step(self, step: int) -> None:
        """From prompts to new weights in the engines."""
        watch = Stopwatch(step, self.recorder)
        with watch.phase("rollout"):
            experience, metrics = self.rollouts.collect(step)
        with watch.phase("signals"):
            credited = self.credit.assign(step, experience)
        with watch.phase("train"):
            metrics |= credited.metrics | self._learn(step, credited)
        with watch.phase("sync"):
            metrics |= self.rollouts.load_weights(step)
        if self._due(step, self.config.evaluation.every):
            with watch.phase("eval"):
                metrics |= self.rollouts.evaluate()
        self.policy.poll_save()
        metrics |= self.policy.save_metrics()
        self.recorder.record(step, metrics | watch.metrics(metrics.get("rollout/tokens", 0.0)))

    def _save(self, step: int) -> None:
        self.recorder.phase(step, "checkpoint")
        self.policy.save(step)

    def _halt(self, step: int, saved: int) -> None:
        """Leaves a complete checkpoint of `step` behind; `saved` is the newest that there is."""
        if step > saved:
            self._save(step)
        self.policy.finish_save()
        self.stop.stopped(step)

    def _start(self) -> None:
        """Step 0: the accuracy before any training."""
        watch = Stopwatch(0, self.recorder)
        metrics: dict[str, float] = {}
        if self.config.evaluation.every:
            with watch.phase("eval"):
                metrics = self.rollouts.evaluate()
        self.recorder.record(0, metrics)

    def _due(self, step: int, every: int) -> bool:
        return bool(every) and (step % every == 0 or step == self.config.trainer.steps)

    def _learn(self, step: int, credited: Credited) -> dict[str, float]:
        """An optimizer step for each part; metrics are means over those."""
        updates = [self.policy.update(part) for part in credited.parts]
        sequences = [sequence for part in credited.parts for sequence in part.sequences]
        scored = [one for update in updates for one in update.scored]
        self.rollouts.keep(step, sequences, scored, credited.notes)
        return mean_metrics([update.metrics for update in updates])


def mean_metrics(parts: list[dict[str, float]]) -> dict[str, float]:
    """One record from those of a step's updates: the largest `_max`, the mean of the rest."""
    combined = {}
    for name in parts[0]:
        values = [part[name] for part in parts]
        combined[name] = max(values) if name.endswith("_max") else sum(values) / len(values)
    return combined
