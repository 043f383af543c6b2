"""Which texts serve as evidence for which rollouts of a group. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_credit.batch.rollout import Rollout
from megatron_credit.credit.evidence import (
    NONE,
    draw_siblings,
    pick_references,
    pick_siblings,
    pick_wrong_answer,
)
from megatron_credit.credit.group import Group
from megatron_credit.credit.need import EvidenceNeed
from megatron_credit.trainer.signals.config import EvidenceSection

SOLUTION = "solution"
"""Metadata of a prompt that holds its reference solution."""
UNPARSED_CHARACTERS = 50
"""What stands for the answer of a response in which none was found (2605.19436)."""


@dataclass(frozen=True)
class Evidence:
    """Texts for and against the answer of one rollout."""

    positive: str | None
    negatives: tuple[str, ...] = ()
    reference: int = NONE
    """The rollout that the positive text comes from, where that is asked for."""

    def texts(self) -> dict[str, str]:
        """By role, for the rollout's record."""
        named = {"positive": self.positive} if self.positive is not None else {}
        several = len(self.negatives) > 1
        return named | {
            f"negative {number}" if several else "negative": text
            for number, text in enumerate(self.negatives, start=1)
        }


def choose_evidence(
    need: EvidenceNeed, section: EvidenceSection, group: Group, rollouts: Sequence[Rollout]
) -> list[Evidence]:
    """The evidence of each rollout of a group, whether anybody reads it or not."""
    texts = [rollout.text for rollout in rollouts]
    if need.positive in ("sibling", "drawn_sibling"):
        positive_N, negative_NK = _siblings(need, section, group)
        found = [
            Evidence(_text(texts, positive), _texts(texts, wrong))
            for positive, wrong in zip(positive_N.tolist(), negative_NK.tolist(), strict=True)
        ]
        if not reads_negatives(need, section):
            return [Evidence(one.positive) for one in found]
        # One of two siblings is no contrast: nobody needs to read it.
        return [one if one.positive and one.negatives else Evidence(None) for one in found]
    if need.positive == "reference":
        # Who has no use for a single verified rollout does not ask for the group's evidence.
        chosen = pick_references(group.reward_N, seed=group.seed, scope="all").tolist()
        return [Evidence(_text(texts, index), (), index) for index in chosen]
    if need.positive == "solution":
        return [Evidence(rollout.metadata.get(SOLUTION)) for rollout in rollouts]
    return _answers(need, section, group, rollouts)


def reads_negatives(need: EvidenceNeed, section: EvidenceSection) -> bool:
    """Whether evidence against an answer is read: not by a contrast with no evidence."""
    return need.negative is not None and not (need.free and section.contrast == "fixed")


def _siblings(need: EvidenceNeed, section: EvidenceSection, group: Group) -> tuple[Tensor, Tensor]:
    if need.positive == "drawn_sibling":
        return draw_siblings(group.reward_N, seed=group.seed, negatives=need.negatives)
    return pick_siblings(group.reward_N, negatives=section.negatives)


def _answers(
    need: EvidenceNeed, section: EvidenceSection, group: Group, rollouts: Sequence[Rollout]
) -> list[Evidence]:
    """The reference answer, and that of a wrong rollout; an empty one is none."""
    wrong = pick_wrong_answer(group.reward_N, exclude_self=section.exclude_self).tolist()
    answers = [
        rollout.text[:UNPARSED_CHARACTERS] if rollout.parsed is None else rollout.parsed
        for rollout in rollouts
    ]
    asked = need.negative is not None
    return [
        Evidence(rollout.answer or None, _texts(answers, [index]) if asked else ())
        for rollout, index in zip(rollouts, wrong, strict=True)
    ]


def _text(texts: Sequence[str], index: int) -> str | None:
    return None if index == NONE else texts[index]


def _texts(texts: Sequence[str], indices: Sequence[int]) -> tuple[str, ...]:
    return tuple(texts[index] for index in indices if index != NONE and texts[index])
