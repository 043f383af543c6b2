"""The policy as the loop uses it: objective, temperature and checkpoint places filled in."""

from torch import Tensor

from megatron_credit.batch.scored import Update
from megatron_credit.batch.sequence import TrainSequence
from megatron_credit.mcore.policy import Policy
from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.run_directory import RunDirectory


class TrainingPolicy:
    """Implements the loop's `Policy`. Every method is called by every rank."""

    def __init__(
        self, policy: Policy, *, config: RunConfig, directory: RunDirectory, is_writer: bool
    ) -> None:
        """The fingerprint of the questions stands in the run directory."""
        self._policy = policy
        self._config = config
        self._directory = directory
        self._is_writer = is_writer

    def score(self, sequences: list[TrainSequence]) -> list[Tensor]:
        """Log-prob of each response token at the sampling temperature, a tensor a sequence."""
        scored = self._policy.score(sequences, temperature=self._config.sampling.temperature)
        return [one.logprob_T for one in scored]

    def update(self, sequences: list[TrainSequence]) -> Update:
        """One optimizer step on the run's objective."""
        return self._policy.update(
            sequences,
            objective=self._config.objective,
            temperature=self._config.sampling.temperature,
        )

    def save(self, step: int) -> None:
        """Writes the checkpoint after `step`, then deletes those that are no longer kept."""
        fingerprint = self._directory.read_data()["fingerprint"]
        self._policy.save(self._directory.checkpoint(step), data=fingerprint)
        if self._is_writer:
            self._directory.prune_checkpoints(self._config.checkpoint.keep_last)
