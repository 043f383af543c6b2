"""RLCSD (2606.11709): a bounded bonus on tokens that right and wrong siblings tell apart."""

from typing import ClassVar

import torch
from pydantic import Field

from megatron_credit.credit.baselines import Base, has_verdict, sequence_advantage, spread
from megatron_credit.credit.evidence import has_evidence
from megatron_credit.credit.group import Group
from megatron_credit.credit.method import CreditMethod
from megatron_credit.credit.need import EvidenceNeed
from megatron_credit.credit.result import CreditResult
from megatron_credit.credit.summary import mean
from megatron_credit.credit.teacher_gap import log_ratio


class Rlcsd(CreditMethod):
    """The baseline's advantage plus the squashed gap of the teachers, never across zero."""

    name: ClassVar[str] = "rlcsd"
    needs: ClassVar[tuple[str, ...]] = ("positive_logprob_NT", "negative_logprob_NT")
    gives: ClassVar[tuple[str, ...]] = ("selected_NT",)
    evidence: ClassVar[EvidenceNeed | None] = EvidenceNeed(
        positive="drawn_sibling", negative="drawn_sibling", negatives=4
    )
    base: Base = "grpo"
    """The group baseline that the bonus is added to."""
    lam: float = Field(0.5, ge=0)
    """The bonus of a token that the teachers tell apart for certain."""
    tau: float = Field(0.02, gt=0)
    """Gap in nats at which the bonus has reached three quarters of that."""
    u_max: float = Field(2.0, ge=0)
    """Largest bonus."""
    threshold: float = Field(0.02, ge=0)
    """A smaller bonus is dropped."""

    def credit(self, group: Group) -> CreditResult:
        """A + u on the tokens whose |u| exceeds the threshold, there no further than to 0."""
        positive_NT, negative_NT = group.positive_logprob_NT, group.negative_logprob_NT
        assert positive_NT is not None and negative_NT is not None
        evidence_N = has_evidence(group.mask_NT, positive_NT, negative_NT)
        gap_NT = log_ratio(positive_NT, negative_NT, group.mask_NT & evidence_N[:, None])
        bonus_NT = (self.lam * (gap_NT / self.tau).tanh()).clamp(-self.u_max, self.u_max)
        selected_NT = bonus_NT.abs() > self.threshold
        base_NT = spread(sequence_advantage(self.base, group.reward_N), group.mask_NT)
        sign_NT = base_NT.sign()
        moved_NT = sign_NT * (sign_NT * (base_NT + bonus_NT)).clamp(min=0)
        valid_N = has_verdict(group.reward_N)
        return CreditResult(
            advantage_NT=torch.where(selected_NT, moved_NT, base_NT),
            selected_NT=selected_NT,
            metrics={
                "credit/selected_tokens": mean(selected_NT[group.mask_NT]),
                "credit/selected_to_zero": mean((moved_NT == 0)[selected_NT & (sign_NT != 0)]),
                "credit/no_evidence_rollouts": float((valid_N & ~evidence_N).sum()),
            },
        )
