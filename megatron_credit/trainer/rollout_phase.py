"""The engines as the trainer ranks see them: rank 0 talks to them, the others get the results."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import TypeVar

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
from megatron_credit.rollouts.fleet import Fleet
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

Result = TypeVar("Result")
WEIGHTS, WAIT, DONE = "weights", "wait", "done"
"""What rank 0 says to the others while it samples: stream the weights, nothing yet, go on."""
POLL_S = 0.1
"""How often rank 0 looks for engines that have come while it samples."""
KEEP_ALIVE_S = 30.0
"""How often the others hear of rank 0, so that their collective does not run out of time."""


class EngineRollouts:
    """Implements the loop's `Rollouts`. Every method is called by every rank.

    Rank 0 samples in a thread, while its main thread leads the others: an engine that comes in the
    middle of the sampling gets the weights at once, and giving them is collective.
    """

    def __init__(
        self,
        *,
        config: RunConfig,
        directory: RunDirectory,
        policy: Policy,
        sampler: Sampler | None,
        fleet: Fleet | None,
    ) -> None:
        """`sampler` and `fleet` exist on rank 0 and are None elsewhere."""
        self._config = config
        self._directory = directory
        self._policy = policy
        self._sampler = sampler
        self._fleet = fleet
        # Always the same thread: processes that it starts end when their starter does.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sampling")
        self._collected: list[Rollout] = []

    def collect(self, step: int) -> tuple[Experience, dict[str, float]]:
        """Samples, grades and shares the groups of a step, those with equal rewards replaced."""
        found = self._while_sampling(lambda sampler: self._collect(sampler, step))
        rollouts, metrics = (None, {}) if found is None else found
        return share(rollouts, group_size=self._config.trainer.samples_per_prompt), metrics

    def _collect(self, sampler: Sampler, step: int) -> tuple[list[Rollout], dict[str, float]]:
        assert self._fleet is not None
        lost, reissued = self._fleet.num_lost, self._fleet.num_reissued
        sizes = self._config.trainer
        found = step_groups(
            sampler,
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
        if self._fleet.can_replace:
            metrics |= {
                "rollout/engines": float(len(self._fleet.current())),
                "rollout/engines_lost": float(self._fleet.num_lost - lost),
                "rollout/reissued": float(self._fleet.num_reissued - reissued),
            }
        return rollouts, metrics

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
        if self._fleet is None:
            self._stream()
            sent = 0
        else:
            metadata = self._policy.weights_metadata()
            sent = self._fleet.send(metadata, self._policy.weights(), step)
        seconds = time.perf_counter() - start
        metrics = {"perf/sync_mb_per_s": sent / 1e6 / seconds}
        if self._config.trainer.check_sync:
            metrics |= self._check_sync(step)
        return metrics

    def evaluate(self) -> dict[str, float]:
        """Accuracy on held-out prompts, on rank 0."""
        return self._while_sampling(self._evaluate) or {}

    def _evaluate(self, sampler: Sampler) -> dict[str, float]:
        attempts = self._config.max_attempts
        sampled = sampler.eval_rollouts(temperature=1.0)
        metrics = accuracy(sampled, "eval/accuracy")
        metrics |= verification(sampled, "eval/verification", attempts)
        if self._config.evaluation.greedy:
            greedy = sampler.eval_rollouts(temperature=0.0)
            metrics |= accuracy(greedy, "eval/accuracy_greedy")
            metrics |= verification(greedy, "eval/verification_greedy", attempts)
        return metrics

    def _while_sampling(self, work: Callable[[Sampler], Result]) -> Result | None:
        """What `work` returns on rank 0, None elsewhere; what it raises is raised on rank 0 before
        the others are told to go on, so that the job ends. Engines that come meanwhile get the
        weights."""
        if self._fleet is None or self._sampler is None:
            while (command := say()) != DONE:
                if command == WEIGHTS:
                    self._stream()
            return None
        with ExitStack() as failed:
            failed.callback(self._fleet.stop)  # or the thread would keep this process from ending
            asked = self._thread.submit(work, self._sampler)
            self._lead(self._fleet, lambda: bool(wait([asked], timeout=POLL_S).done))
            failed.pop_all()
        result = asked.result()
        say(DONE)
        return result

    def _lead(self, fleet: Fleet, is_done: Callable[[], bool]) -> None:
        """Gives weights to the engines that come, until the sampling is done, well or not."""
        said = time.monotonic()
        while not is_done():
            if fleet.newcomers():
                say(WEIGHTS)
                fleet.send_to_newcomers(self._policy.weights_metadata(), self._policy.weights())
            elif time.monotonic() - said > KEEP_ALIVE_S:
                say(WAIT)
            else:
                continue
            said = time.monotonic()

    def _stream(self) -> None:
        """This rank's part in giving weights: the gathers of a streamed tensor need every rank."""
        for _ in self._policy.weights():
            pass

    def _check_sync(self, step: int) -> dict[str, float]:
        """Compares both sides' log-probs of one response sampled with the new weights.

        Raises RuntimeError on every rank when they differ by more than the tolerance.
        """
        rollouts = self._while_sampling(lambda sampler: [sampler.probe(step)])
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


def say(command: str = "") -> str:
    """Rank 0's command, on every rank; the others say nothing. Collective."""
    header, _ = broadcast_payload({"command": command})
    return header["command"]


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
