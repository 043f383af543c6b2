"""CAL-GRPO (2604.17912): calibrated credit for each attempt, for Verification@K."""

from typing import ClassVar, Literal

from torch import Tensor

from megatron_credit.credit.attempts import (
    Attempts,
    Scale,
    Singleton,
    against_others,
    attempt_metrics,
    attempt_weight,
    prompt_scale,
    read_attempts,
    trajectory_advantage,
)
from megatron_credit.credit.columns import on_tokens
from megatron_credit.credit.group import Group
from megatron_credit.credit.method import CreditMethod
from megatron_credit.credit.result import CreditResult

Estimator = Literal["calibrated", "return", "naive", "trajectory"]


class CalGrpo(CreditMethod):
    """Pass or fail of an attempt against the others there, times what a pass at it adds."""

    name: ClassVar[str] = "cal_grpo"
    needs: ClassVar[tuple[str, ...]] = ("attempt_id_NT", "attempt_pass_NK")
    estimator: Estimator = "calibrated"
    """calibrated: weighed by the share of failures that no later attempt rescued; return: won or
    not, against the others that reached the attempt (also unbiased where kinds of failure differ in
    their chance of rescue, but noisier); naive: unweighed, biased; trajectory: GRPO on won or not,
    for which the other options mean nothing."""
    singleton: Singleton = "zero"
    """What the only rollout to reach an attempt gets there: 0, or 1 if it was won (`return`), which
    makes the estimate exactly unbiased."""
    scale: Scale = "none"
    """prompt_std: advantages are divided by the standard deviation of won or not + 1e-6."""

    def credit(self, group: Group) -> CreditResult:
        """The advantage of each attempt on its trained tokens."""
        attempts = read_attempts(group)
        return CreditResult(
            advantage_NT=on_tokens(self._advantage_NK(attempts), attempts.id_NT),
            metrics=attempt_metrics(attempts),
        )

    def _advantage_NK(self, attempts: Attempts) -> Tensor:
        if self.estimator == "trajectory":
            return trajectory_advantage(attempts)
        won_NK = attempts.won_N[:, None].expand_as(attempts.passed_NK)
        outcome_NK = won_NK if self.estimator == "return" else attempts.passed_NK
        advantage_NK = against_others(outcome_NK, attempts, self.singleton)
        if self.estimator == "calibrated":
            # A rollout that is alone gets its own return, which needs no calibration.
            weight_K = attempt_weight(attempts).where(~attempts.alone_K, 1.0)
            advantage_NK = weight_K * advantage_NK
        return prompt_scale(attempts, self.scale) * advantage_NK
