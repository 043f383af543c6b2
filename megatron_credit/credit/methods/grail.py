"""GRAIL (2606.04889): tokens weighed by how strongly their activation moves the boxed answer."""

from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from megatron_credit.credit.answer_span import AnswerPart
from megatron_credit.credit.baselines import Base, has_verdict, sequence_advantage, spread
from megatron_credit.credit.evidence import has_evidence
from megatron_credit.credit.group import Group
from megatron_credit.credit.method import CreditMethod
from megatron_credit.credit.result import CreditResult
from megatron_credit.credit.summary import mean, weight_metrics

_SALIENCY_FLOOR = 1e-8
_VARIANCE_FLOOR = 1e-8


class Grail(CreditMethod):
    """The baseline's advantage, larger on tokens of high saliency for the answer."""

    name: ClassVar[str] = "grail"
    needs: ClassVar[tuple[str, ...]] = ("saliency_NT", "answer_part_NT")
    base: Base = "dr_grpo"
    """The group baseline that the weights multiply."""
    w_std: float = Field(0.5, ge=0)
    """Weight gained by one standard deviation of log saliency."""
    w_mean: float = Field(1.0, ge=0)
    """Weight at the row's mean log saliency, and of the box's marker and brace and what follows."""
    w_min: float = Field(0.5, ge=0)
    """Smallest weight."""
    w_max: float = Field(5.0, ge=0)
    """Largest weight, and that of the answer's own tokens."""
    rollouts: Literal["wrong", "correct", "both"] = "wrong"
    """Whose tokens are weighed by saliency: rollouts of advantage <= 0, those above 0, or all. In
    the others only the box is weighed."""
    exclude_after_box: bool = False
    """Tokens after the box do not count in the mean and variance of log saliency."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        if self.w_min > self.w_max:
            raise ValueError(
                f"has w_min = {self.w_min} above w_max = {self.w_max}; lower w_min or raise w_max"
            )
        return self

    def required(self, group: Group) -> tuple[str, ...]:
        """Saliency and answer, unless all rewards are equal."""
        return self.needs if sequence_advantage(self.base, group.reward_N).any() else ()

    def reads(self, group: Group, signal: str) -> Tensor:
        """Saliency of the rollouts whose tokens it weighs, the answers of all."""
        if signal != "saliency_NT":
            return super().reads(group, signal)
        return self._weighs(sequence_advantage(self.base, group.reward_N))

    def credit(self, group: Group) -> CreditResult:
        """A times the weight of each token; 0 where all rewards are equal."""
        advantage_N = sequence_advantage(self.base, group.reward_N)
        advantage_NT = spread(advantage_N, group.mask_NT)
        if not advantage_N.any():
            return CreditResult(advantage_NT=advantage_NT, metrics={})
        log_saliency_NT, part_NT = _read(group)
        evidence_N = has_evidence(group.mask_NT, log_saliency_NT)
        box_NT = part_NT.where(evidence_N[:, None], AnswerPart.NONE)
        weighed_N = _has_box(box_NT) & self._weighs(advantage_N)
        raw_NT = self.w_mean + self.w_std * self._standard(log_saliency_NT, box_NT, group.mask_NT)
        weight_NT = raw_NT.clamp(self.w_min, self.w_max).where(weighed_N[:, None], 1.0)
        weight_NT = self._weigh_box(weight_NT, box_NT)
        valid_N = has_verdict(group.reward_N)
        raw_M = raw_NT[group.mask_NT & weighed_N[:, None] & (box_NT == AnswerPart.NONE)]
        return CreditResult(
            advantage_NT=advantage_NT * weight_NT,
            metrics={
                **weight_metrics(weight_NT[group.mask_NT & valid_N[:, None]]),
                "credit/weight_clip_low": mean(raw_M < self.w_min),
                "credit/weight_clip_high": mean(raw_M > self.w_max),
                "credit/unboxed_rollouts": float((valid_N & ~_has_box(part_NT)).sum()),
                "credit/no_evidence_rollouts": float((valid_N & ~evidence_N).sum()),
            },
        )

    def _weighs(self, advantage_N: Tensor) -> Tensor:
        """[N] bool: saliency counts in rollouts of this advantage."""
        positive_N = advantage_N > 0
        if self.rollouts == "both":
            return torch.ones_like(positive_N)
        return positive_N if self.rollouts == "correct" else ~positive_N

    def _standard(self, log_saliency_NT: Tensor, box_NT: Tensor, mask_NT: Tensor) -> Tensor:
        """[N, T] float64: (log saliency - mean) / std over the row's trained tokens."""
        counted_NT = mask_NT
        if self.exclude_after_box:
            counted_NT = mask_NT & (box_NT != AnswerPart.AFTER)
        centred_NT = log_saliency_NT - _row_mean(log_saliency_NT, counted_NT)
        variance_N1 = _row_mean(centred_NT.square(), counted_NT)
        return centred_NT / (variance_N1 + _VARIANCE_FLOOR).sqrt()

    def _weigh_box(self, weight_NT: Tensor, box_NT: Tensor) -> Tensor:
        """The weights with those of the box and of what follows it put in."""
        weight_NT = weight_NT.where(box_NT == AnswerPart.NONE, self.w_mean)
        return weight_NT.where(box_NT != AnswerPart.CONTENT, self.w_max)


def _read(group: Group) -> tuple[Tensor, Tensor]:
    """log(saliency + 1e-8) in float64 and the answer parts; 0 and NONE outside the mask."""
    saliency_NT, part_NT = group.saliency_NT, group.answer_part_NT
    assert saliency_NT is not None and part_NT is not None
    log_saliency_NT = (saliency_NT.double() + _SALIENCY_FLOOR).log()
    return (
        log_saliency_NT.where(group.mask_NT, 0.0),
        part_NT.where(group.mask_NT, AnswerPart.NONE),
    )


def _has_box(part_NT: Tensor) -> Tensor:
    return (part_NT > AnswerPart.NONE).any(dim=1)


def _row_mean(value_NT: Tensor, counted_NT: Tensor) -> Tensor:
    """[N, 1]: mean of the counted tokens of each row, 0 where there are none."""
    total_N1 = value_NT.where(counted_NT, 0.0).sum(dim=1, keepdim=True)
    return total_N1 / counted_NT.sum(dim=1, keepdim=True).clamp(min=1)
