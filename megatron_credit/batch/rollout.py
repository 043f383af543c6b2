"""What the rollout side hands over: token ids and numbers, never text to be tokenised again."""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class VersionSpan(NamedTuple):
    """Response tokens [start, end) were sampled by weights number `version`."""

    version: int
    start: int
    end: int


class Span(NamedTuple):
    """Response tokens [start, end) belong together; `score` is NaN where they have none."""

    start: int
    end: int
    score: float = math.nan


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One question: chat messages, the reference answer and what the task knows about it."""

    id: str
    messages: list[dict[str, str]]
    answer: str
    metadata: dict = field(default_factory=dict)
    source: str = ""
    """The dataset it comes from; empty where there is one only."""
    template_options: dict = field(default_factory=dict)
    """Options of the tokenizer's chat template, such as enable_thinking."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sampled response as the engine returned it.

    `logprobs` are those of the sampling distribution (after temperature), one for each token.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    versions: list[VersionSpan]
    routed_experts: str = ""
    """Experts of each token where the engine was asked for them; see `routing.decode_experts`."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One graded response; a line of `rollouts/step-*.jsonl` has these names.

    Lists with a number for each response token: `logprobs` (of the sampling distribution, in nats),
    `mask` (True: the policy sampled the token), `advantages` (empty before credit was assigned)
    and each of `token_values`.
    """

    prompt_id: str
    sample: int
    """Number of the rollout in its group, from 0."""
    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]
    mask: list[bool]
    versions: list[VersionSpan]
    finish_reason: str
    text: str
    answer: str
    """The reference answer."""
    reward: float
    """NaN: no verdict."""
    outcome: str = ""
    """right, wrong, unparsed, timeout or error; see `rewards.verdict`."""
    parsed: str | None = None
    """The answer found in the text, in a normal form."""
    source: str = ""
    """The dataset of the prompt."""
    messages: list[dict[str, str]] = field(default_factory=list)
    """Chat messages of the prompt."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """Options of the chat template that `prompt_ids` were rendered with; JSON values."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """What the task knows of the prompt; JSON values."""
    advantages: list[float] = field(default_factory=list)
    token_values: dict[str, list[float]] = field(default_factory=dict)
    """What the trainer knows of each token: policy_logprob and entropy (nats), and the weights and
    divergences of the credit method; NaN where there is none."""
    spans: dict[str, list[Span]] = field(default_factory=dict)
    """Borders of each `attempt`, `step` and `segment`, with their scores."""
    routed_experts: str = ""
    """Experts of each token where the engine was asked for them; see `routing.decode_experts`."""
    evidence: dict[str, str] = field(default_factory=dict)
    """Texts that the credit method held against this one, by their role."""
