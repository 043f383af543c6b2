"""Rank 0's side of the rollout phase: prompts in, graded rollouts out."""

import hashlib
import json
import logging
import math
from collections import Counter
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from megatron_credit.batch.rollout import Prompt, Rollout
from megatron_credit.data.chat import encode_prompt
from megatron_credit.rewards.verdict import count_outcomes
from megatron_credit.rollouts.client import Engine, GenerateRequest
from megatron_credit.rollouts.config import AttemptsConfig, SamplingConfig
from megatron_credit.tasks.base import Task
from megatron_credit.trainer.attempts import (
    UNFINISHED,
    Attempt,
    Chain,
    attempt_metrics,
    is_finished,
    passed_within,
)
from megatron_credit.trainer.feedback_turn import FeedbackTurn, read_feedback_turn
from megatron_credit.trainer.resampling import STRIDE, has_equal_rewards
from megatron_credit.trainer.shaped_rewards import shaped

log = logging.getLogger(__name__)
SHOWN_FAILURES = 5


def log_failures(chains: Sequence[Chain]) -> None:
    """Says why there is no verdict on a last attempt, for the first few; metrics count all."""
    failed = [chain for chain in chains if math.isnan(chain.attempts[-1].verdict.reward)]
    for chain in failed[:SHOWN_FAILURES]:
        verdict = chain.attempts[-1].verdict
        log.warning(
            "no verdict on %s, sample %d: %s: %s",
            chain.prompt.id,
            chain.sample,
            verdict.outcome,
            verdict.detail,
        )


class Sampler:
    """Samples groups of rollouts from the engine and grades them.

    With `attempts`, a rollout whose answer failed is told so and answers again behind it, until it
    passes. An attempt that is truncated has failed and is the last, one without a verdict too.

    Every choice follows from (seed, step, prompt, sample, attempt), never from what was drawn
    before, so a resumed run draws what an uninterrupted one would have drawn.
    """

    def __init__(
        self,
        *,
        task: Task,
        tokenizer: PreTrainedTokenizerBase,
        engine: Engine,
        sampling: SamplingConfig,
        seed: int,
        attempts: AttemptsConfig | None = None,
    ) -> None:
        self._task = task
        self._tokenizer = tokenizer
        self._engine = engine
        self._sampling = sampling
        self._seed = seed
        self._attempts = attempts
        self._stop = stop_tokens(tokenizer, sampling)
        self._turns: dict[str, FeedbackTurn] = {}

    def train_groups(
        self,
        step: int,
        *,
        num_prompts: int,
        num_samples: int,
        places: Sequence[int] | None = None,
        number: int = 0,
    ) -> list[list[Rollout]]:
        """The groups of one step (from 1): prompts follow each other in the task's order.

        With `places`, from 0, of those alone. A try `number` above 0 has prompts that no step has.
        """
        first = (step - 1) * num_prompts + number * STRIDE
        wanted = range(num_prompts) if places is None else places
        groups = self.groups(
            [self._task.train_prompt(first + place) for place in wanted],
            num_samples=num_samples,
            temperature=self._sampling.temperature,
            purpose=f"train-{step}-try-{number}" if number else f"train-{step}",
        )
        return [[shaped(rollout, self._sampling) for rollout in group] for group in groups]

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
        """One rollout of a prompt, of one attempt, to compare engine and trainer log-probs on."""
        prompts = (self._task.eval_prompts() or [self._task.train_prompt(0)])[:1]
        chains = self._first_attempts(
            prompts,
            num_samples=1,
            temperature=self._sampling.temperature,
            purpose=f"probe-{step}",
        )
        return self._rollout(chains[0])

    def groups(
        self, prompts: Sequence[Prompt], *, num_samples: int, temperature: float, purpose: str
    ) -> list[list[Rollout]]:
        """Graded rollouts of each prompt; `purpose` keeps their seeds apart from others'."""
        chains = self._first_attempts(
            prompts, num_samples=num_samples, temperature=temperature, purpose=purpose
        )
        if self._attempts is not None:
            for number in range(2, self._attempts.max_attempts + 1):
                failed = [chain for chain in chains if self._goes_on(chain, number)]
                self._attempt_again(failed, number, temperature=temperature, purpose=purpose)
        rollouts = list(map(self._rollout, chains))
        return [rollouts[k : k + num_samples] for k in range(0, len(rollouts), num_samples)]

    def _first_attempts(
        self, prompts: Sequence[Prompt], *, num_samples: int, temperature: float, purpose: str
    ) -> list[Chain]:
        """`num_samples` chains for each prompt, each with its first attempt."""
        prompt_ids = [encode_prompt(self._tokenizer, prompt) for prompt in prompts]
        names = distinct_names([prompt.id for prompt in prompts])
        asked = list(zip(prompts, prompt_ids, names, strict=True))
        chains = [
            Chain(prompt=prompt, prompt_ids=ids, name=name, sample=sample)
            for prompt, ids, name in asked
            for sample in range(num_samples)
        ]
        requests = [
            self._request(ids, num_samples, temperature, derive_seed(self._seed, purpose, name))
            for _, ids, name in asked
        ]
        self._extend(chains, requests)
        return chains

    def _attempt_again(
        self, chains: Sequence[Chain], number: int, *, temperature: float, purpose: str
    ) -> None:
        """Adds attempt `number` to each chain, behind the feedback on the one before."""
        requests = []
        for chain in chains:
            feedback_ids = self._turn(chain.prompt).token_ids
            context = [*chain.prompt_ids, *chain.response_ids(feedback_ids), *feedback_ids]
            own = f"{purpose}-attempt-{number}-sample-{chain.sample}"
            seed = derive_seed(self._seed, own, chain.name)
            requests.append(self._request(context, 1, temperature, seed))
        if requests:
            self._extend(chains, requests)

    def _request(
        self, prompt_ids: list[int], num_samples: int, temperature: float, seed: int
    ) -> GenerateRequest:
        return GenerateRequest(
            prompt_ids=prompt_ids,
            num_samples=num_samples,
            temperature=temperature,
            max_new_tokens=self._sampling.max_new_tokens,
            stop_token_ids=self._stop,
            seed=seed,
        )

    def _extend(self, chains: Sequence[Chain], requests: Sequence[GenerateRequest]) -> None:
        """Samples, grades and adds an attempt to each chain; the requests' samples, in order, are
        the chains'."""
        completions = [one for samples in self._engine.generate(requests) for one in samples]
        # A truncated answer counts as it stands; a truncated attempt has failed, whatever it says.
        graded = [
            number
            for number, completion in enumerate(completions)
            if self._attempts is None or is_finished(completion)
        ]
        verdicts = dict.fromkeys(range(len(chains)), UNFINISHED)
        texts = [(chains[k].prompt, self._text(completions[k].token_ids)) for k in graded]
        verdicts |= zip(graded, self._task.grade(texts), strict=True)
        for number, (chain, completion) in enumerate(zip(chains, completions, strict=True)):
            chain.attempts.append(Attempt(completion=completion, verdict=verdicts[number]))
        log_failures(chains)

    def _goes_on(self, chain: Chain, number: int) -> bool:
        """Whether the chain gets an attempt of this number, from 2."""
        last = chain.attempts[-1]
        # Chains that ended earlier are shorter.
        return (
            len(chain.attempts) == number - 1
            and last.failed
            and last.ended_by(self._turn(chain.prompt).end_id)
        )

    def _turn(self, prompt: Prompt) -> FeedbackTurn:
        """What stands between two attempts at the prompt."""
        assert self._attempts is not None
        options = json.dumps(prompt.template_options, sort_keys=True)
        if options not in self._turns:
            self._turns[options] = read_feedback_turn(
                self._tokenizer, prompt, self._attempts.feedback, self._stop
            )
        return self._turns[options]

    def _rollout(self, chain: Chain) -> Rollout:
        if self._attempts is None:
            return chain.rollout(text=self._text(chain.response_ids([])), with_spans=False)
        feedback_ids = self._turn(chain.prompt).token_ids
        text = self._text(chain.response_ids(feedback_ids))
        return chain.rollout(text=text, feedback_ids=feedback_ids, with_spans=True)

    def _text(self, token_ids: list[int]) -> str:
        """The text without the token that ended it."""
        if token_ids and token_ids[-1] in self._stop:
            token_ids = token_ids[:-1]
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))


def stop_tokens(tokenizer: PreTrainedTokenizerBase, sampling: SamplingConfig) -> tuple[int, ...]:
    """The tokens that end a response."""
    # transformers does not say that this one is an id
    end = tokenizer.eos_token_id
    return sampling.stop_token_ids or (end,)  # pyright: ignore[reportReturnType]


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


def group_metrics(groups: list[list[Rollout]], *, max_attempts: int = 1) -> dict[str, float]:
    """Rewards, outcomes, lengths and attempts of a step, before any credit."""
    rollouts = [rollout for group in groups for rollout in group]
    rewards = [rollout.reward for rollout in rollouts if math.isfinite(rollout.reward)]
    lengths = [len(rollout.response_ids) for rollout in rollouts]
    equal = sum(has_equal_rewards(group) for group in groups)
    metrics = count_outcomes(rollout.outcome for rollout in rollouts) | {
        "reward/mean": sum(rewards) / max(len(rewards), 1),
        "group/equal_rewards": equal / len(groups),
        "rollout/truncated": sum(r.finish_reason == "length" for r in rollouts) / len(rollouts),
        "rollout/tokens": float(sum(lengths)),
        "rollout/length_mean": sum(lengths) / len(lengths),
        "rollout/length_max": float(max(lengths)),
    }
    return metrics | (attempt_metrics(rollouts, max_attempts) if max_attempts > 1 else {})


def accuracy(rollouts: list[Rollout], name: str) -> dict[str, float]:
    """The share of right answers under this metric name, and of each dataset where there are
    several; empty without rollouts. Of several attempts the first is the answer."""
    return passed_shares(rollouts, 1, name)


def verification(rollouts: list[Rollout], name: str, max_attempts: int) -> dict[str, float]:
    """Verification@k as `name`_at_k for k from 2 on, as `accuracy` gives it for 1: the share that
    is right within k attempts, each after the verifier's word on the one before."""
    found: dict[str, float] = {}
    for k in range(2, max_attempts + 1):
        found |= passed_shares(rollouts, k, f"{name}_at_{k}")
    return found


def passed_shares(rollouts: list[Rollout], num_attempts: int, name: str) -> dict[str, float]:
    """The share that passed within so many attempts, in all and by dataset."""
    if not rollouts:
        return {}
    by_source: dict[str, list[bool]] = {}
    for rollout in rollouts:
        by_source.setdefault(rollout.source, []).append(passed_within(rollout, num_attempts))
    shares = {source: sum(right) / len(right) for source, right in by_source.items()}
    total = sum(map(sum, by_source.values())) / len(rollouts)
    parts = {f"{name}/{source}": share for source, share in shares.items()}
    return {name: total} | (parts if len(parts) > 1 else {})
