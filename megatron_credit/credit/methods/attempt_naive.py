"""The biased baseline of CAL-GRPO (2604.17912): each attempt on its own."""

from typing import ClassVar

from megatron_credit.credit.attempts import (
    Scale,
    Singleton,
    against_others,
    attempt_metrics,
    prompt_scale,
    read_attempts,
)
from megatron_credit.credit.columns import on_tokens
from megatron_credit.credit.group import Group
from megatron_credit.credit.method import CreditMethod
from megatron_credit.credit.result import CreditResult


class AttemptNaive(CreditMethod):
    """Pass or fail of an attempt against the others that reached it, whatever came later."""

    name: ClassVar[str] = "attempt_naive"
    needs: ClassVar[tuple[str, ...]] = ("attempt_id_NT", "attempt_pass_NK")
    singleton: Singleton = "zero"
    """What the only rollout to reach an attempt gets there: 0, or 1 if it was won (`return`)."""
    scale: Scale = "none"
    """prompt_std: advantages are divided by the standard deviation of won or not + 1e-6."""

    def credit(self, group: Group) -> CreditResult:
        """Passed minus the mean of the others, on the trained tokens of each attempt."""
        attempts = read_attempts(group)
        advantage_NK = against_others(attempts.passed_NK, attempts, self.singleton)
        advantage_NK = prompt_scale(attempts, self.scale) * advantage_NK
        return CreditResult(
            advantage_NT=on_tokens(advantage_NK, attempts.id_NT),
            metrics=attempt_metrics(attempts),
        )
