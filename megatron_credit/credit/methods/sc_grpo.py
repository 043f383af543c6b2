"""SC-GRPO (2606.18810): tokens on which knowing a sibling's response changes the policy's mind."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from megatron_credit.credit.baselines import (
    Base,
    has_verdict,
    is_verified,
    sequence_advantage,
    spread,
)
from megatron_credit.credit.evidence import has_evidence
from megatron_credit.credit.group import Group
from megatron_credit.credit.method import CreditMethod
from megatron_credit.credit.need import EvidenceNeed
from megatron_credit.credit.percentile import percentile
from megatron_credit.credit.result import CreditResult
from megatron_credit.credit.summary import mean, weight_metrics


class ScGrpo(CreditMethod):
    """The baseline's advantage times f = D / (D + c), D the divergence of the self-teacher.

    Where nobody is verified, rollouts are compared by their mean f over the length of a random one.
    """

    name: ClassVar[str] = "sc_grpo"
    needs: ClassVar[tuple[str, ...]] = ("teacher_kl_NT", "reference_index_N")
    evidence: ClassVar[EvidenceNeed | None] = EvidenceNeed(positive="reference")
    base: Base = "grpo"
    """The group baseline that the factors multiply."""
    alpha: float = Field(0.1, ge=0)
    """Size of the advantages where nobody is verified."""
    percentile: float = Field(75.0, ge=0, le=100)
    """Which percentile of D is c: over the optimizer step, or without `kl_scale` over the group."""
    c_min: float = Field(1e-4, gt=0)
    """Smallest c, in nats."""
    scope: Literal["partial", "all"] = "partial"
    """all: a group with a single verified rollout is weighed too."""
    normalise: bool = False
    """Factors of a mean of one over the group's tokens with evidence."""
    mix: float = Field(1.0, ge=0, le=1)
    """Share of the factor in a token's weight; the rest is 1. One half keeps most of the early gain
    and is steadier later, when divergences say less. Not in the paper, which has 1."""

    def required(self, group: Group) -> tuple[str, ...]:
        """Divergences where they weigh; who was whose reference where nobody is verified."""
        if not self._weighs(group.reward_N):
            return ()
        return self.needs[:1] if is_verified(group.reward_N).any() else self.needs

    def over_step(self, groups: Sequence[Group]) -> list[Group]:
        """c from the tokens with evidence of all groups that have divergences."""
        found = [_divergence(group) for group in groups if group.teacher_kl_NT is not None]
        kl_J = torch.cat([kl_NT[evidence_NT] for kl_NT, evidence_NT in found] or [torch.zeros(0)])
        scale = percentile(kl_J, self.percentile)
        return [replace(group, kl_scale=scale) for group in groups]

    def credit(self, group: Group) -> CreditResult:
        """A f in rows with evidence, A in the others."""
        if not self._weighs(group.reward_N):
            advantage_N = sequence_advantage(self.base, group.reward_N)
            return CreditResult(
                advantage_NT=spread(advantage_N, group.mask_NT), metrics={"group/plain": 1.0}
            )
        kl_NT, evidence_NT = _divergence(group)
        valid_N, evidence_N = has_verdict(group.reward_N), _has_divergence(group)
        scale = self._scale(kl_NT[evidence_NT], group.kl_scale)
        factor_NT = kl_NT / (kl_NT + scale)
        explores = not is_verified(group.reward_N).any()
        if explores:
            advantage_N = self.alpha * _bonus(factor_NT, evidence_N, group)
        else:
            advantage_N = sequence_advantage(self.base, group.reward_N)
        factor_M = factor_NT[evidence_NT]
        weight_NT = self._weight(factor_NT, mean(factor_M)).where(evidence_NT, 1.0)
        return CreditResult(
            advantage_NT=spread(advantage_N, group.mask_NT) * weight_NT,
            metrics={
                **weight_metrics(weight_NT[evidence_NT]),
                "credit/kl_scale": scale,
                "credit/no_evidence_rollouts": float((valid_N & ~evidence_N).sum()),
                "group/plain": 0.0,
                "group/none_verified": float(explores),
            },
        )

    def _weighs(self, reward_N: Tensor) -> bool:
        """Nobody verified, or at least two (under `all` one) but not all."""
        num_valid, num_verified = int(has_verdict(reward_N).sum()), int(is_verified(reward_N).sum())
        fewest = 1 if self.scope == "all" else 2
        return num_verified == 0 or fewest <= num_verified < num_valid

    def _scale(self, kl_J: Tensor, given: float | None) -> float:
        """c, the divergence that is weighed by one half."""
        scale = percentile(kl_J, self.percentile) if given is None else given
        if not math.isfinite(scale):
            raise ValueError(f"kl_scale is {scale}; expected a finite number of nats")
        return max(scale, self.c_min)

    def _weight(self, factor_NT: Tensor, mean_factor: float) -> Tensor:
        # Where every factor is 0 there is nothing to normalise.
        scale = mean_factor if self.normalise and mean_factor > 0 else 1.0
        return factor_NT / scale if self.mix == 1 else 1 + self.mix * (factor_NT / scale - 1)


def _has_divergence(group: Group) -> Tensor:
    """[N] bool: a verdict, and a divergence of each trained token."""
    assert group.teacher_kl_NT is not None
    return has_evidence(group.mask_NT, group.teacher_kl_NT) & has_verdict(group.reward_N)


def _divergence(group: Group) -> tuple[Tensor, Tensor]:
    """D in float64, and the trained tokens of rows with evidence, outside of which D is 0."""
    assert group.teacher_kl_NT is not None
    evidence_NT = group.mask_NT & _has_divergence(group)[:, None]
    return group.teacher_kl_NT.double().clamp(min=0).where(evidence_NT, 0.0), evidence_NT


def _bonus(factor_NT: Tensor, evidence_N: Tensor, group: Group) -> Tensor:
    """[N] float64: the standardised mean factor of each rollout that has a reference, else 0.

    The mean is over as many of its first trained tokens as the reference has, so that length
    alone earns nothing.
    """
    reference_N, mask_NT = group.reference_index_N, group.mask_NT
    assert reference_N is not None
    length_N = mask_NT.sum(dim=1)
    known_N = (reference_N >= 0) & evidence_N
    if int(reference_N.max()) >= len(length_N):
        raise ValueError(
            f"reference_index_N has {int(reference_N.max())}, but the group has {len(length_N)} "
            "rollouts; indices count them from 0, -1 means none"
        )
    reference_N = reference_N.long().clamp(min=0)
    serves_N = torch.zeros_like(known_N).index_fill(0, reference_N[known_N], True)
    first_NT = mask_NT & (mask_NT.cumsum(dim=1) <= length_N[reference_N][:, None])
    # 0 / 0 of a rollout without such tokens is NaN, which the baseline takes for no verdict.
    mean_N = factor_NT.where(first_NT, 0.0).sum(dim=1) / first_NT.sum(dim=1)
    return sequence_advantage("grpo", mean_N.where(known_N & ~serves_N, torch.nan))
