"""RLSD (2604.03128): tokens that the right answer makes likelier count more."""

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from megatron_credit.credit.baselines import Base, sequence_advantage
from megatron_credit.credit.group import Group
from megatron_credit.credit.method import CreditMethod
from megatron_credit.credit.need import EvidenceNeed
from megatron_credit.credit.result import CreditResult
from megatron_credit.credit.teacher_gap import decayed, unweighed, weighed_by_gap


class Rlsd(CreditMethod):
    """CEPO with the policy in the plain context in place of the teacher that saw a wrong answer."""

    name: ClassVar[str] = "rlsd"
    needs: ClassVar[tuple[str, ...]] = ("positive_logprob_NT", "policy_logprob_NT")
    evidence: ClassVar[EvidenceNeed | None] = EvidenceNeed(positive="answer")
    base: Base = "grpo"
    """The group baseline that the weights multiply."""
    e_w: float = Field(0.2, ge=0)
    """Weights are clipped to 1 - this and 1 + this before they are mixed in."""
    lam0: float = Field(0.5, ge=0, le=1)
    """Share of the weights at step 1; the rest is a weight of 1."""
    T_warm: float = Field(50.0, gt=0)
    """Optimizer steps over which that share falls linearly to 0."""

    def required(self, group: Group) -> tuple[str, ...]:
        """Nothing once the schedule has ended."""
        return self.needs if self._mixing(group) > 0 else ()

    def reads(self, group: Group, signal: str) -> Tensor:
        """The rollouts that have an advantage to be weighed."""
        return sequence_advantage(self.base, group.reward_N) != 0

    def credit(self, group: Group) -> CreditResult:
        """A times a weight between 1 - mixing x e_w and 1 + mixing x e_w."""
        mixing = self._mixing(group)
        if mixing == 0:
            return unweighed(self.base, group)
        policy_NT = group.policy_logprob_NT
        assert policy_NT is not None
        return weighed_by_gap(self.base, group, policy_NT, mixing=mixing, bound=self.e_w)

    def _mixing(self, group: Group) -> float:
        return decayed(self.lam0, step=group.step, num_steps=self.T_warm)
