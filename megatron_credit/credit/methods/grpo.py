"""GRPO (2402.03300): one group-relative advantage for the whole rollout."""

from typing import ClassVar

from megatron_credit.credit.baselines import sequence_advantage, spread
from megatron_credit.credit.group import Group
from megatron_credit.credit.method import CreditMethod
from megatron_credit.credit.result import CreditResult


class Grpo(CreditMethod):
    """Reward minus the group's mean, over its unbiased standard deviation."""

    name: ClassVar[str] = "grpo"

    def credit(self, group: Group) -> CreditResult:
        """(R - mean) / (std + 1e-6) on every trained token."""
        advantage_N = sequence_advantage("grpo", group.reward_N)
        return CreditResult(advantage_NT=spread(advantage_N, group.mask_NT), metrics={})
