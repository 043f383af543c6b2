"""Dr. GRPO (2503.20783): GRPO without the division by the standard deviation."""

from typing import ClassVar

from megatron_credit.credit.baselines import sequence_advantage, spread
from megatron_credit.credit.group import Group
from megatron_credit.credit.method import CreditMethod
from megatron_credit.credit.result import CreditResult


class DrGrpo(CreditMethod):
    """Reward minus the group's mean; hard and easy prompts keep their own scale."""

    name: ClassVar[str] = "dr_grpo"

    def credit(self, group: Group) -> CreditResult:
        """R - mean on every trained token."""
        advantage_N = sequence_advantage("dr_grpo", group.reward_N)
        return CreditResult(advantage_NT=spread(advantage_N, group.mask_NT), metrics={})
