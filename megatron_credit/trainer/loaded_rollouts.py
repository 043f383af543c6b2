"""Recorded rollouts as the trainer ranks see them: rank 0 reads them and tells the others."""

from collections.abc import Iterator

from megatron_credit.batch.rollout import Rollout
from megatron_credit.batch.rollout_files import write_rollouts
from megatron_credit.batch.scored import Scored
from megatron_credit.batch.sequence import TrainSequence
from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.experience import Experience, with_credit
from megatron_credit.trainer.rollout_phase import share
from megatron_credit.trainer.run_directory import RunDirectory
from megatron_credit.trainer.sampler import group_metrics
from megatron_credit.trainer.shaped_rewards import overlong_metrics
from megatron_credit.trainer.signals.step import Note


class LoadedRollouts:
    """Implements the loop's `Rollouts` without an engine. Every rank calls every method."""

    def __init__(
        self,
        *,
        config: RunConfig,
        directory: RunDirectory,
        steps: Iterator[list[list[Rollout]]] | None,
    ) -> None:
        """`steps` holds the groups of each step that is still to be trained; None but on rank 0."""
        self._max_attempts = config.max_attempts
        self._sampling = config.sampling
        self._group_size = config.trainer.samples_per_prompt
        self._directory = directory
        self._steps = steps
        self._collected: list[Rollout] = []

    def collect(self, step: int) -> tuple[Experience, dict[str, float]]:
        """Shares the groups of the next step, which is `step`."""
        if self._steps is None:
            return share(None, group_size=self._group_size), {}
        groups = next(self._steps)
        self._collected = [rollout for group in groups for rollout in group]
        metrics = group_metrics(groups, max_attempts=self._max_attempts)
        metrics |= overlong_metrics(self._collected, self._sampling)
        return share(self._collected, group_size=self._group_size), metrics

    def keep(
        self,
        step: int,
        sequences: list[TrainSequence],
        scored: list[Scored],
        notes: list[Note],
    ) -> None:
        """Writes the step's rollouts to the run directory, on rank 0, with their new credit."""
        if self._steps is not None:
            rollouts = map(with_credit, self._collected, sequences, scored, notes)
            write_rollouts(self._directory.rollout_file(step), rollouts)

    def load_weights(self, step: int) -> dict[str, float]:
        """Nothing: nobody samples with them."""
        return {}

    def evaluate(self) -> dict[str, float]:
        """Nothing: nobody samples answers."""
        return {}
