"""VERPO (2609.06100): evidence from siblings counts where it agrees with the verdict."""

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from megatron_credit.credit.baselines import Base, has_verdict, sequence_advantage, spread
from megatron_credit.credit.evidence import has_evidence
from megatron_credit.credit.group import Group
from megatron_credit.credit.method import CreditMethod
from megatron_credit.credit.need import EvidenceNeed, Loss
from megatron_credit.credit.result import CreditResult
from megatron_credit.credit.summary import mean

_BELOW_ONE = 1 - 2.0**-24
"""The largest float32 below 1."""


class Verpo(CreditMethod):
    """The baseline's advantage and a controller w of how far to follow the evidence at a token."""

    name: ClassVar[str] = "verpo"
    needs: ClassVar[tuple[str, ...]] = (
        "contrast_target_NT",
        "contrast_mean_NT",
        "contrast_cost_NT",
    )
    gives: ClassVar[tuple[str, ...]] = ("evidence_weight_NT", "evidence_mask_NT")
    evidence: ClassVar[EvidenceNeed | None] = EvidenceNeed(
        positive="sibling", negative="sibling", free=True, teacher="ema"
    )
    base: Base = "dr_grpo"
    """The group baseline."""
    mode: Literal["loss", "advantage"] = "loss"
    """loss: A stays, and w weighs the objective's evidence loss; advantage: A (1 + lambda_adv w),
    for an objective without that loss."""
    lambda_adv: float = Field(1.0, ge=0)
    """How much of w goes into the advantage in that mode."""
    cost_alpha: float = Field(0.0025, ge=0)
    """Benefit that a unit of the contrast's variance must outweigh for w = 1/2."""
    cost_epsilon: float = Field(2.5e-5, gt=0)
    """Benefit that leaves w at 1/2 where the variance is 0."""

    def losses(self) -> tuple[Loss, ...]:
        """The reference term always, the evidence loss where w is not in the advantage."""
        return ("reference", "evidence") if self.mode == "loss" else ("reference",)

    def credit(self, group: Group) -> CreditResult:
        """The advantages with w, which is 0 where the evidence contradicts A or there is none."""
        target_NT, mean_NT, cost_NT = (
            group.contrast_target_NT,
            group.contrast_mean_NT,
            group.contrast_cost_NT,
        )
        assert target_NT is not None and mean_NT is not None and cost_NT is not None
        evidence_N = has_evidence(group.mask_NT, target_NT, mean_NT, cost_NT)
        evidence_NT = group.mask_NT & evidence_N[:, None]
        advantage_NT = spread(sequence_advantage(self.base, group.reward_N), group.mask_NT)
        benefit_NT = advantage_NT * (target_NT.double() - mean_NT.double())
        weight_NT = self._controller(benefit_NT, cost_NT.double()).where(evidence_NT, 0.0)
        valid_N = has_verdict(group.reward_N)
        judged_NT = evidence_NT & valid_N[:, None]
        gain = self.lambda_adv if self.mode == "advantage" else 0.0
        return CreditResult(
            advantage_NT=advantage_NT * (1 + gain * weight_NT),
            evidence_weight_NT=weight_NT,
            evidence_mask_NT=evidence_NT,
            metrics={
                "credit/controller_mean": mean(weight_NT[judged_NT]),
                "credit/controller_on": mean(weight_NT[judged_NT] > 0),
                "credit/no_evidence_rollouts": float((valid_N & ~evidence_N).sum()),
            },
        )

    def _controller(self, benefit_NT: Tensor, cost_NT: Tensor) -> Tensor:
        """h / (h + cost_alpha c + cost_epsilon), with h the benefit and c the cost, both >= 0."""
        gained_NT = benefit_NT.clamp(min=0)
        price_NT = self.cost_alpha * cost_NT.clamp(min=0) + self.cost_epsilon
        # Divided by h above and below, which also holds where h has overflowed or is 0.
        return (1 / (1 + price_NT / gained_NT)).clamp(max=_BELOW_ONE)
