"""CEPO (2605.19436): tokens that the right answer explains better than a wrong one count more."""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from megatron_credit.credit.baselines import Base, sequence_advantage
from megatron_credit.credit.evidence import has_evidence
from megatron_credit.credit.group import Group
from megatron_credit.credit.method import CreditMethod
from megatron_credit.credit.need import EvidenceNeed
from megatron_credit.credit.result import CreditResult
from megatron_credit.credit.teacher_gap import decayed, unweighed, weighed_by_gap


class Cepo(CreditMethod):
    """The baseline's advantage, more of it where the gap of the two teachers has its sign."""

    name: ClassVar[str] = "cepo"
    needs: ClassVar[tuple[str, ...]] = (
        "positive_logprob_NT",
        "negative_logprob_NT",
        "policy_logprob_NT",
    )
    evidence: ClassVar[EvidenceNeed | None] = EvidenceNeed(positive="answer", negative="answer")
    base: Base = "grpo"
    """The group baseline that the weights multiply."""
    e_w: float = Field(0.5, ge=0)
    """Weights are clipped to 1 - this and 1 + this before they are mixed in."""
    lam0: float = Field(0.5, ge=0, le=1)
    """Share of the weights at step 1; the rest is a weight of 1."""
    T_warm: float = Field(25.0, gt=0)
    """Optimizer steps over which that share falls linearly to 0."""
    fallback: Literal["grpo", "rlsd"] = "grpo"
    """For a rollout without a wrong answer: it keeps A, or the policy is the other teacher."""

    def required(self, group: Group) -> tuple[str, ...]:
        """Nothing once the schedule has ended; the policy's log-probs for the fallback only."""
        if self._mixing(group) == 0:
            return ()
        return self.needs if self.fallback == "rlsd" else self.needs[:2]

    def reads(self, group: Group, signal: str) -> Tensor:
        """The rollouts that have an advantage to be weighed."""
        return sequence_advantage(self.base, group.reward_N) != 0

    def credit(self, group: Group) -> CreditResult:
        """A times a weight between 1 - mixing x e_w and 1 + mixing x e_w."""
        mixing = self._mixing(group)
        if mixing == 0:
            return unweighed(self.base, group)
        return weighed_by_gap(
            self.base, group, self._negative_NT(group), mixing=mixing, bound=self.e_w
        )

    def _mixing(self, group: Group) -> float:
        return decayed(self.lam0, step=group.step, num_steps=self.T_warm)

    def _negative_NT(self, group: Group) -> Tensor:
        """Log-probs under the other teacher, with those of the fallback where it has none."""
        negative_NT = group.negative_logprob_NT
        assert negative_NT is not None
        if self.fallback == "grpo":
            return negative_NT
        policy_NT = group.policy_logprob_NT
        assert policy_NT is not None
        present_N = has_evidence(group.mask_NT, negative_NT)
        return torch.where(present_N[:, None], negative_NT, policy_NT)
