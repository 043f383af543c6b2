"""SRPO (2604.02288): rollouts above the mean are reinforced, the others learn from a sibling."""

from typing import ClassVar

from megatron_credit.credit.baselines import sequence_advantage, spread
from megatron_credit.credit.evidence import has_evidence
from megatron_credit.credit.group import Group
from megatron_credit.credit.method import CreditMethod
from megatron_credit.credit.need import EvidenceNeed, Loss
from megatron_credit.credit.result import CreditResult
from megatron_credit.credit.summary import mean


class Srpo(CreditMethod):
    """GRPO's advantage where it is positive, SDPO's distillation loss on the other rollouts."""

    name: ClassVar[str] = "srpo"
    needs: ClassVar[tuple[str, ...]] = ("positive_logprob_NT",)
    gives: ClassVar[tuple[str, ...]] = ("distillation_mask_NT",)
    evidence: ClassVar[EvidenceNeed | None] = EvidenceNeed(
        positive="sibling", teacher="ema", top_k=100
    )

    def losses(self) -> tuple[Loss, ...]:
        """The divergence from the teacher."""
        return ("distillation",)

    def credit(self, group: Group) -> CreditResult:
        """max(A, 0), and the trained tokens of the rollouts with A <= 0 that have evidence."""
        positive_NT = group.positive_logprob_NT
        assert positive_NT is not None
        advantage_N = sequence_advantage("grpo", group.reward_N)
        evidence_N = has_evidence(group.mask_NT, positive_NT)
        distilled_NT = group.mask_NT & (evidence_N & (advantage_N <= 0))[:, None]
        return CreditResult(
            advantage_NT=spread(advantage_N.clamp(min=0), group.mask_NT),
            distillation_mask_NT=distilled_NT,
            metrics={"credit/distilled_tokens": mean(distilled_NT[group.mask_NT])},
        )
