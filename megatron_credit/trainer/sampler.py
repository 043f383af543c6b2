"""Rank 0's side of the rollout phase: prompts in, graded rollouts out."""

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from megatron_credit.batch.rollout import Completion, Prompt, Rollout
from megatron_credit.data.chat import encode_prompt
from megatron_credit.rewards.verdict import Verdict, count_outcomes
from megatron_credit.rollouts.client import EngineClient, GenerateRequest
from megatron_credit.rollouts.config import SamplingConfig
from megatron_credit.tasks.base import Task

log = logging.getLogger(__name__)
SHOWN_FAILURES = 5


@dataclass(frozen=True)
class Answer:
    """One response before its verdict."""

    prompt: Prompt
    prompt_ids: list[int]
    sample: int
    completion: Completion
    text: str
    """What is graded: the response without the token that ended it."""

    def rollout(self, verdict: Verdict) -> Rollout:
        """The graded response."""
        return Rollout(
            prompt_id=self.prompt.id,
            source=self.prompt.source,
            sample=self.sample,
            prompt_ids=self.prompt_ids,
            response_ids=self.completion.token_ids,
            logprobs=self.completion.logprobs,
            mask=[True] * len(self.completion.token_ids),
            versions=self.completion.versions,
            finish_reason=self.completion.finish_reason,
            routed_experts=self.completion.routed_experts,
            text=self.text,
            answer=self.prompt.answer,
            reward=verdict.reward,
            outcome=verdict.outcome,
            parsed=verdict.parsed,
        )


def log_failures(answers: Sequence[Answer], verdicts: Sequence[Verdict]) -> None:
    """Says why there is no verdict, for the first few of a batch; metrics count them all."""
    failed = [
        (answer, verdict)
        for answer, verdict in zip(answers, verdicts, strict=True)
        if math.isnan(verdict.reward)
    ]
    for answer, verdict in failed[:SHOWN_FAILURES]:
        log.warning(
            "no verdict on %s, sample %d: %s: %s",
            answer.prompt.id,
            answer.sample,
            verdict.outcome,
            verdict.detail,
        )


class Sampler:
    """Samples groups of rollouts from the engine and grades them.

    Every choice follows from (seed, step, prompt), never from what was drawn before, so a resumed
    run draws what an uninterrupted one would have drawn.
    """

    def __init__(
        self,
        *,
        task: Task,
        tokenizer: PreTrainedTokenizerBase,
        engine: EngineClient,
        sampling: SamplingConfig,
        seed: int,
    ) -> None:
        self._task = task
        self._tokenizer = tokenizer
        self._engine = engine
        self._sampling = sampling
        self._seed = seed
        self._stop = sampling.stop_token_ids or (tokenizer.eos_token_id,)

    def train_groups(self, step: int, *, num_prompts: int, num_samples: int) -> list[list[Rollout]]:
        """The groups of one step (from 1): prompts follow each other in the task's order."""
        first = (step - 1) * num_prompts
        prompts = [self._task.train_prompt(first + offset) for offset in range(num_prompts)]
        return self.groups(
            prompts,
            num_samples=num_samples,
            temperature=self._sampling.temperature,
            purpose=f"train-{step}",
        )

    def eval_rollouts(self, *, temperature: float) -> list[Rollout]:
        """One rollout of each held-out prompt; temperature 0 is greedy.

        The seeds are the same in every evaluation, so that two of them differ by the weights alone.
        """
        prompts = self._task.eval_prompts()
        if not prompts:
            return []
        groups = self.groups(prompts, num_samples=1, temperature=temperature, purpose="eval")
        return [group[0] for group in groups]

    def probe(self, step: int) -> Rollout:
        """One rollout of a prompt, to compare engine and trainer log-probs on."""
        prompts = (self._task.eval_prompts() or [self._task.train_prompt(0)])[:1]
        groups = self.groups(
            prompts,
            num_samples=1,
            temperature=self._sampling.temperature,
            purpose=f"probe-{step}",
        )
        return groups[0][0]

    def groups(
        self, prompts: Sequence[Prompt], *, num_samples: int, temperature: float, purpose: str
    ) -> list[list[Rollout]]:
        """Graded rollouts of each prompt; `purpose` keeps their seeds apart from others'."""
        prompt_ids = [encode_prompt(self._tokenizer, prompt) for prompt in prompts]
        names = distinct_names([prompt.id for prompt in prompts])
        requests = [
            GenerateRequest(
                prompt_ids=ids,
                num_samples=num_samples,
                temperature=temperature,
                max_new_tokens=self._sampling.max_new_tokens,
                stop_token_ids=self._stop,
                seed=derive_seed(self._seed, purpose, name),
            )
            for ids, name in zip(prompt_ids, names, strict=True)
        ]
        completions = self._engine.generate(requests)
        answers = [
            Answer(prompt, ids, sample, completion, self._text(completion))
            for prompt, ids, samples in zip(prompts, prompt_ids, completions, strict=True)
            for sample, completion in enumerate(samples)
        ]
        verdicts = self._task.grade([(answer.prompt, answer.text) for answer in answers])
        log_failures(answers, verdicts)
        rollouts = list(map(Answer.rollout, answers, verdicts))
        return [rollouts[k : k + num_samples] for k in range(0, len(rollouts), num_samples)]

    def _text(self, completion: Completion) -> str:
        ids = completion.token_ids
        if ids and ids[-1] in self._stop:
            ids = ids[:-1]
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def distinct_names(names: Sequence[str]) -> list[str]:
    """The names, with a number where one comes again: such groups need other samples."""
    seen = Counter[str]()
    distinct = []
    for name in names:
        distinct.append(f"{name}#{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return distinct


def derive_seed(seed: int, purpose: str, prompt_id: str) -> int:
    """A seed in [0, 2^31) that depends on nothing but its arguments.

    The engine numbers the samples of a request upwards from it; hashing keeps requests far apart.
    """
    digest = hashlib.sha256(f"{seed}/{purpose}/{prompt_id}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def group_metrics(groups: list[list[Rollout]]) -> dict[str, float]:
    """Rewards, outcomes and lengths of a step, before any credit."""
    rollouts = [rollout for group in groups for rollout in group]
    rewards = [rollout.reward for rollout in rollouts if math.isfinite(rollout.reward)]
    lengths = [len(rollout.response_ids) for rollout in rollouts]
    equal = sum(has_equal_rewards(group) for group in groups)
    return count_outcomes(rollout.outcome for rollout in rollouts) | {
        "reward/mean": sum(rewards) / max(len(rewards), 1),
        "group/equal_rewards": equal / len(groups),
        "rollout/truncated": sum(r.finish_reason == "length" for r in rollouts) / len(rollouts),
        "rollout/tokens": float(sum(lengths)),
        "rollout/length_mean": sum(lengths) / len(lengths),
        "rollout/length_max": float(max(lengths)),
    }


def has_equal_rewards(group: list[Rollout]) -> bool:
    """Whether no two verdicts of the group differ, so that it teaches nothing."""
    return len({rollout.reward for rollout in group if math.isfinite(rollout.reward)}) <= 1


def accuracy(rollouts: list[Rollout], name: str) -> dict[str, float]:
    """The share of right answers under this metric name, and of each dataset where there are
    several; empty without rollouts."""
    if not rollouts:
        return {}
    by_source: dict[str, list[bool]] = {}
    for rollout in rollouts:
        by_source.setdefault(rollout.source, []).append(rollout.reward == 1.0)
    shares = {source: sum(right) / len(right) for source, right in by_source.items()}
    total = sum(map(sum, by_source.values())) / len(rollouts)
    parts = {f"{name}/{source}": share for source, share in shares.items()}
    return {name: total} | (parts if len(parts) > 1 else {})
