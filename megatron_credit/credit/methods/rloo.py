"""RLOO: the leave-one-out baseline."""

from typing import ClassVar

from megatron_credit.credit.baselines import sequence_advantage, spread
from megatron_credit.credit.group import Group
from megatron_credit.credit.method import CreditMethod
from megatron_credit.credit.result import CreditResult


class Rloo(CreditMethod):
    """Reward minus the mean of the other rollouts, an unbiased baseline."""

    name: ClassVar[str] = "rloo"

    def credit(self, group: Group) -> CreditResult:
        """R - mean of the others on every trained token."""
        advantage_N = sequence_advantage("rloo", group.reward_N)
        return CreditResult(advantage_NT=spread(advantage_N, group.mask_NT), metrics={})
