"""What a method's teachers are shown, as data: the trainer builds it and names no method."""

from dataclasses import dataclass
from typing import Literal

Loss = Literal["reference", "evidence", "distillation"]
"""Losses beside the surrogate: towards the evidence-free teacher, along the evidence as weighed by
the controller, and the divergence from the teacher that saw evidence."""
Positive = Literal["sibling", "drawn_sibling", "reference", "answer", "solution"]
Negative = Literal["sibling", "drawn_sibling", "answer"]


@dataclass(frozen=True)
class EvidenceNeed:
    """The contexts in which teachers read a rollout."""

    positive: Positive
    """sibling: the first verified rollout of the group but the row's own; drawn_sibling: a random
    one; reference: as `credit.evidence.pick_references` chooses; answer: the reference answer;
    solution: the reference solution that comes with the prompt."""
    negative: Negative | None = None
    """sibling, drawn_sibling: of the wrong rollouts; answer: that of a wrong rollout."""
    negatives: int = 1
    """Most wrong siblings of a row."""
    free: bool = False
    """The teacher also reads the rollout without any evidence."""
    teacher: Literal["current", "ema"] = "current"
    """Whose weights read the evidence where the run does not say otherwise."""
    top_k: int | None = None
    """Tokens that the distillation loss tells apart where the run does not say otherwise; None: the
    whole vocabulary."""
