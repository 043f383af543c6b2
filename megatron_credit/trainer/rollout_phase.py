"""The engines as the trainer ranks see them: rank 0 talks to them, the others get the results."""

import time

import torch
from torch import Tensor

from megatron_credit.batch.rollout import Rollout
from megatron_credit.batch.rollout_files import write_rollouts
from megatron_credit.batch.scored import Scored
from megatron_credit.batch.sequence import TrainSequence
from megatron_credit.mcore.exchange import (
    broadcast_payload,
    decode_sequences,
    encode_sequences,
)
from megatron_credit.mcore.policy import Policy
from megatron_credit.rollouts.sync import WeightSync
from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.experience import Experience, to_sequence, with_credit
from megatron_credit.trainer.resampling import step_groups
from megatron_credit.trainer.run_directory import RunDirectory
from megatron_credit.trainer.sampler import (
    Sampler,
    accuracy,
    group_metrics,
    verification,
)
from megatron_credit.trainer.shaped_rewards import overlong_metrics
from megatron_credit.trainer.signals.step import Note


class EngineRollouts:
    """Implements the loop's `Rollouts`. Every method is called by every rank."""

    def __init__(
        self,
        *,
        config: RunConfig,
        directory: RunDirectory,
        policy: Policy,
        sampler: Sampler | None,
        sync: WeightSync | None,
    ) -> None:
        """`sampler` and `sync` exist on rank 0 and are None elsewhere."""
        self._config = config
        self._directory = directory
        self._policy = policy
        self._sampler = sampler
        self._sync = sync
        self._collected: list[Rollout] = []

    def collect(self, step: int) -> tuple[Experience, dict[str, float]]:
        """Samples, grades and shares the groups of a step, those with equal rewards replaced."""
        rollouts, metrics = None, {}
        if self._sampler is not None:
            sizes = self._config.trainer
            found = step_groups(
                self._sampler,
                step,
                num_prompts=sizes.prompts_per_step,
                num_samples=sizes.samples_per_prompt,
                tries=sizes.resample_tries,
            )
            rollouts = [rollout for group in found.groups for rollout in group]
            self._collected = rollouts
            metrics = group_metrics(found.groups, max_attempts=self._config.max_attempts)
            metrics |= overlong_metrics(rollouts, self._config.sampling)
            metrics |= found.metrics() if sizes.resample_tries else {}
        return share(rollouts, group_size=self._config.trainer.samples_per_prompt), metrics

    def keep(
        self,
        step: int,
        sequences: list[TrainSequence],
        scored: list[Scored],
        notes: list[Note],
    ) -> None:
        """Writes the step's rollouts to the run directory, on rank 0."""
        if self._sampler is not None:
            rollouts = map(with_credit, self._collected, sequences, scored, notes)
            write_rollouts(self._directory.rollout_file(step), rollouts)

    def load_weights(self, step: int) -> dict[str, float]:
        """Broadcasts the policy's weights; afterwards the engine's version is `step`."""
        start = time.perf_counter()
        weights = self._policy.weights()
        if self._sync is None:
            for _ in weights:  # the gathers of a streamed tensor need every rank
                pass
            sent = 0
        else:
            sent = self._sync.send(self._policy.weights_metadata(), weights, version=step)
        seconds = time.perf_counter() - start
        metrics = {"perf/sync_mb_per_s": sent / 1e6 / seconds}
        if self._config.trainer.check_sync:
            metrics |= self._check_sync(step)
        return metrics

    def evaluate(self) -> dict[str, float]:
        """Accuracy on held-out prompts, on rank 0."""
        if self._sampler is None:
            return {}
        attempts = self._config.max_attempts
        sampled = self._sampler.eval_rollouts(temperature=1.0)
        metrics = accuracy(sampled, "eval/accuracy")
        metrics |= verification(sampled, "eval/verification", attempts)
        if self._config.evaluation.greedy:
            greedy = self._sampler.eval_rollouts(temperature=0.0)
            metrics |= accuracy(greedy, "eval/accuracy_greedy")
            metrics |= verification(greedy, "eval/verification_greedy", attempts)
        return metrics

    def _check_sync(self, step: int) -> dict[str, float]:
        """Compares both sides' log-probs of one response sampled with the new weights.

        Raises RuntimeError on every rank when they differ by more than the tolerance.
        """
        rollouts = None if self._sampler is None else [self._sampler.probe(step)]
        sequence = share(rollouts, group_size=1).sequences[0]
        temperature = self._config.sampling.temperature
        scored_T: Tensor = self._policy.score([sequence], temperature=temperature)[0].logprob_T
        gap = (scored_T - sequence.rollout_logprob_T).abs().max().item()
        if not gap <= self._config.trainer.sync_tolerance:
            raise RuntimeError(
                f"after the weight sync of step {step} the engine's log-probs are {gap:.2e} nat "
                f"away from the trainer's (trainer.sync_tolerance="
                f"{self._config.trainer.sync_tolerance}): it does not run the weights it was sent"
            )
        return {"mismatch/after_sync_max": gap}


def share(rollouts: list[Rollout] | None, *, group_size: int) -> Experience:
    """The rollouts that rank 0 has as training sequences on all ranks; None on the others."""
    tensors: dict[str, Tensor] = {}
    if rollouts is not None:
        tensors = encode_sequences([to_sequence(rollout) for rollout in rollouts])
        rewards = [rollout.reward for rollout in rollouts]
        tensors["reward_R"] = torch.tensor(rewards, dtype=torch.float64)
    _, shared = broadcast_payload({}, tensors)
    return Experience(
        sequences=decode_sequences(shared),
        reward_R=shared["reward_R"],
        group_size=group_size,
        records=rollouts,
    )
