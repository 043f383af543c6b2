"""Rollouts of several attempts in one context, and what the attempts of a group came to.

Shape letters: N rollouts of a group, T response tokens, K attempts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from megatron_credit.batch.rollout import Completion, Prompt, Rollout, Span, VersionSpan
from megatron_credit.rewards.verdict import Verdict

ATTEMPT = "attempt"
"""The key of attempts in `Rollout.spans`."""
UNFINISHED = Verdict("unparsed", detail="the attempt was truncated")
"""Of an attempt that did not come to its end: it failed, whatever it says."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One graded attempt."""

    completion: Completion
    verdict: Verdict

    @property
    def failed(self) -> bool:
        """The verifier came to a verdict, and it is not `right`."""
        return self.verdict.reward < 0.5

    def ended_by(self, token_id: int) -> bool:
        """Whether the policy ended the attempt itself, by this token."""
        return is_finished(self.completion) and self.completion.token_ids[-1] == token_id


@dataclass(kw_only=True)
class Chain:
    """A rollout that is being sampled: its attempts so far, each behind the ones before."""

    prompt: Prompt
    prompt_ids: list[int]
    name: str
    """The prompt's id, made distinct among the prompts that are sampled together."""
    sample: int
    """Number of the rollout in its group, from 0."""
    attempts: list[Attempt] = field(default_factory=list)

    def response_ids(self, feedback_ids: Sequence[int]) -> list[int]:
        """Token ids of all attempts, with those of the feedback between them."""
        response_ids: list[int] = []
        for attempt in self.attempts:
            if response_ids:
                response_ids += feedback_ids
            response_ids += attempt.completion.token_ids
        return response_ids

    def rollout(self, *, text: str, with_spans: bool, feedback_ids: Sequence[int] = ()) -> Rollout:
        """The finished rollout with the text of its response, graded as its last attempt was."""
        last = self.attempts[-1]
        if len(self.attempts) > 1 and last.completion.routed_experts:
            raise ValueError(
                "the engine says which experts the tokens of an attempt went to, which cannot be "
                "put together for several attempts; turn policy.router_replay off, or leave "
                "[attempts] out"
            )
        logprobs: list[float] = []
        mask: list[bool] = []
        versions: list[VersionSpan] = []
        spans: list[Span] = []
        for attempt in self.attempts:
            if spans:
                logprobs += [math.nan] * len(feedback_ids)
                mask += [False] * len(feedback_ids)
            start = len(mask)
            logprobs += attempt.completion.logprobs
            mask += [True] * len(attempt.completion.token_ids)
            versions += shifted(attempt.completion.versions, start)
            spans.append(Span(start, len(mask), attempt.verdict.reward))
        return Rollout(
            prompt_id=self.prompt.id,
            source=self.prompt.source,
            messages=self.prompt.messages,
            template_options=self.prompt.template_options,
            metadata=self.prompt.metadata,
            sample=self.sample,
            prompt_ids=self.prompt_ids,
            response_ids=self.response_ids(feedback_ids),
            logprobs=logprobs,
            mask=mask,
            versions=versions,
            finish_reason=last.completion.finish_reason,
            routed_experts=last.completion.routed_experts,
            text=text,
            answer=self.prompt.answer,
            reward=last.verdict.reward,
            outcome=last.verdict.outcome,
            parsed=last.verdict.parsed,
            spans={ATTEMPT: spans} if with_spans else {},
        )


def is_finished(completion: Completion) -> bool:
    """Whether the policy ended it, by a stop token."""
    return completion.finish_reason == "stop"


def shifted(versions: Sequence[VersionSpan], start: int) -> list[VersionSpan]:
    """The spans of an attempt as those of the response that it begins in at `start`."""
    return [VersionSpan(one.version, start + one.start, start + one.end) for one in versions]


def attempt_signals(rollouts: Sequence[Rollout]) -> tuple[list[Tensor], Tensor]:
    """The attempts of a group's N rollouts as `credit.Group` wants them.

    For each rollout its attempt_id_T, int64: the attempt (from 0) of each response token, -1 on
    feedback. And attempt_pass_NK, float32: 1 passed, 0 failed, NaN not reached or no verdict; K is
    the largest number of attempts in the group. ValueError where a rollout does not say its
    attempts, or says something else.
    """
    ids: list[Tensor] = []
    scores: list[list[float]] = []
    for rollout in rollouts:
        check_attempts(rollout, f"prompt {rollout.prompt_id!r}, sample {rollout.sample}")
        attempt_id_T = torch.full((len(rollout.response_ids),), -1)
        for number, span in enumerate(rollout.spans[ATTEMPT]):
            attempt_id_T[span.start : span.end] = number
        ids.append(attempt_id_T)
        scores.append([span.score for span in rollout.spans[ATTEMPT]])
    num_attempts = max(map(len, scores), default=0)
    padded = [row + [math.nan] * (num_attempts - len(row)) for row in scores]
    return ids, torch.tensor(padded, dtype=torch.float32).reshape(len(scores), num_attempts)


def check_attempts(rollout: Rollout, name: str) -> None:
    """ValueError, with the rollout's name, where it has no attempts, or not one after the other
    with a score each, holding all trained tokens."""
    spans = rollout.spans.get(ATTEMPT)
    if not spans:
        raise ValueError(
            f"{name} has no spans of attempts; sample rollouts with an [attempts] section"
        )
    free = rollout.mask.copy()
    end = 0
    for span in spans:
        if not end <= span.start <= span.end <= len(free):
            raise ValueError(
                f"{name} has attempts at {[[one.start, one.end] for one in spans]}; expected "
                f"[start, end) one after the other within {len(free)} response tokens"
            )
        if span.score not in (0.0, 1.0) and not math.isnan(span.score):
            raise ValueError(
                f"{name} has an attempt with score {span.score}; expected 1 (passed), 0 (failed) "
                "or null (no verdict)"
            )
        end = span.end
        free[span.start : end] = [False] * (end - span.start)
    if any(free):
        raise ValueError(
            f"{name} trains on response token {free.index(True)}, which belongs to no attempt; "
            "set its mask to false, or extend an attempt's span to it"
        )


def passed_within(rollout: Rollout, num_attempts: int) -> bool:
    """Whether one of the first attempts is known to have passed."""
    return verdict_within(rollout, num_attempts) is True


def verdict_within(rollout: Rollout, num_attempts: int) -> bool | None:
    """Whether one of the first attempts passed; None where none did and one has no verdict. A
    rollout without spans of attempts is one."""
    spans = rollout.spans.get(ATTEMPT)
    scores = [rollout.reward] if spans is None else [span.score for span in spans[:num_attempts]]
    if any(score == 1.0 for score in scores):
        return True
    return None if any(map(math.isnan, scores)) else False


def attempt_metrics(rollouts: Sequence[Rollout], max_attempts: int) -> dict[str, float]:
    """How the attempts of a step went; a share of nothing is left out."""
    chains = [rollout.spans.get(ATTEMPT, []) for rollout in rollouts]
    found: dict[str, float] = {}
    for number in range(1, max_attempts + 1):
        reached = [spans[number - 1] for spans in chains if len(spans) >= number]
        scores = [span.score for span in reached if not math.isnan(span.score)]
        if number > 1:
            found[f"attempts/reached_{number}"] = len(reached) / max(len(chains), 1)
        if scores:
            found[f"attempts/pass_{number}"] = sum(scores) / len(scores)
    repeats = [same for rollout in rollouts for same in repeated(rollout)]
    return found | ({"attempts/repeated": sum(repeats) / len(repeats)} if repeats else {})


def repeated(rollout: Rollout) -> list[bool]:
    """For each attempt but the first, whether it has the tokens of the one before."""
    texts = [rollout.response_ids[one.start : one.end] for one in rollout.spans.get(ATTEMPT, [])]
    return [one == before for before, one in pairwise(texts)]
