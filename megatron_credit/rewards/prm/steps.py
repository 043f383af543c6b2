"""What a process reward model is asked and what it says. S = steps of a response."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any


@dataclass(frozen=True)
class StepItem:
    """A response to score."""

    prompt: str
    """The question."""
    steps: tuple[str, ...]
    """[S] texts of the steps, each with the separator that ends it."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """What the data knows of the question; it must be JSON."""


@dataclass(frozen=True)
class StepScores:
    """The scores of one response."""

    scores: tuple[float, ...]
    """[S] in [0, 1], or all NaN where the model failed."""
    problem: str | None = None
    """Why there are no scores, in words; None: there are."""


class ProcessSpent(Exception):
    """The process cannot score anything any more, another one perhaps can."""


def no_scores(item: StepItem, problem: str) -> StepScores:
    """NaN for every step."""
    return StepScores((math.nan,) * len(item.steps), problem)


def read_scores(returned: Any, num_steps: int) -> list[float]:
    """The scores that a function returned: a list, a tuple, an array or a tensor of [S] numbers.

    ValueError where it is something else, has another length, or holds a number outside [0, 1].
    """
    values = _plain(returned)
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise ValueError(f"expected a list of scores, got {returned!r:.80}")
    if len(values) != num_steps:
        raise ValueError(f"got {len(values)} scores for {num_steps} steps")
    return [_score(_plain(value), step) for step, value in enumerate(values)]


def _plain(value: Any) -> Any:
    """Arrays and tensors as lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


def _score(value: Any, step: int) -> float:
    # NaN fails the comparison too.
    if not isinstance(value, Real) or not 0 <= float(value) <= 1:
        raise ValueError(f"the score of step {step} is {value!r:.80}, no number from 0 to 1")
    return float(value)
