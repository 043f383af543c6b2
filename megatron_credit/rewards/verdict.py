"""What a verifier says of one response."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Outcome = Literal["right", "wrong", "unparsed", "timeout", "error"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


@dataclass(frozen=True)
class Verdict:
    """The outcome of checking one response, and the answer that was found in it."""

    outcome: Outcome
    """right and wrong: the answer was compared. unparsed: the response holds no answer. timeout and
    error: the verifier did not come to a verdict."""
    parsed: str | None = None
    """The answer in a normal form: equal answers have equal strings; None: there is none."""
    detail: str = ""
    """Why there is no verdict, in words."""

    @property
    def reward(self) -> float:
        """1.0 right, 0.0 wrong or unparsed; NaN, no verdict, where the verifier failed."""
        if self.outcome == "right":
            return 1.0
        return 0.0 if self.outcome in ("wrong", "unparsed") else math.nan


def count_outcomes(outcomes: Iterable[str]) -> dict[str, float]:
    """Metrics: the share of each outcome, as reward/right, reward/wrong, ...; of nothing, none."""
    counts = Counter(outcomes)
    total = counts.total()
    return {f"reward/{outcome}": counts[outcome] / total for outcome in OUTCOMES} if total else {}
