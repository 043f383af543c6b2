"""OPSD (2601.18734): the policy learns from itself with the reference solution in context."""

from dataclasses import replace
from typing import ClassVar

from megatron_credit.credit.evidence import has_evidence
from megatron_credit.credit.group import Group
from megatron_credit.credit.method import CreditMethod
from megatron_credit.credit.need import EvidenceNeed, Loss
from megatron_credit.credit.result import CreditResult, no_credit
from megatron_credit.credit.summary import mean


class Opsd(CreditMethod):
    """No advantage at all: the tokens of rollouts with evidence get the distillation loss."""

    name: ClassVar[str] = "opsd"
    needs: ClassVar[tuple[str, ...]] = ("positive_logprob_NT",)
    gives: ClassVar[tuple[str, ...]] = ("distillation_mask_NT",)
    evidence: ClassVar[EvidenceNeed | None] = EvidenceNeed(positive="solution")

    def losses(self) -> tuple[Loss, ...]:
        """The divergence from the teacher."""
        return ("distillation",)

    def credit(self, group: Group) -> CreditResult:
        """0, and the trained tokens of the rollouts that the teacher saw evidence for."""
        positive_NT = group.positive_logprob_NT
        assert positive_NT is not None
        distilled_NT = group.mask_NT & has_evidence(group.mask_NT, positive_NT)[:, None]
        metrics = {"credit/distilled_tokens": mean(distilled_NT[group.mask_NT])}
        return replace(no_credit(group.mask_NT, metrics), distillation_mask_NT=distilled_NT)
