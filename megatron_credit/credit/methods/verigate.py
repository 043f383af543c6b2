"""VeriGate (2605.30451): step-level process rewards, but only where the verifier cannot rank."""

from typing import ClassVar, Literal

import torch
from pydantic import ConfigDict, Field
from torch import Tensor

from megatron_credit.credit.baselines import has_verdict, is_wrong, sequence_advantage, spread
from megatron_credit.credit.columns import on_tokens
from megatron_credit.credit.group import Group
from megatron_credit.credit.method import CreditMethod
from megatron_credit.credit.result import CreditResult
from megatron_credit.credit.steps import Steps, future_sum, read_steps, standardised

_SOFT_MINIMUM = 0.1
"""Temperature of the softmax that stands for the minimum (PURE, 2504.15275)."""


class VeriGate(CreditMethod):
    """GRPO where rewards differ; where all are equal and wrong, the steps as the PRM ranks them."""

    # The option is called `credit`, which as an attribute is the method's own function.
    model_config = ConfigDict(
        validate_by_alias=True, validate_by_name=True, serialize_by_alias=True
    )
    name: ClassVar[str] = "verigate"
    needs: ClassVar[tuple[str, ...]] = ("step_id_NT", "step_score_NS")
    gate: Literal["all_wrong", "any_degenerate"] = "all_wrong"
    """Which groups of equal rewards get process rewards: the wrong ones, or all."""
    credit_rule: Literal["future_sum", "future_mean", "min"] = Field("future_sum", alias="credit")
    """Value of a step: the scores from it on; their sum by the number of steps left, so that
    splitting a step gains nothing; or the sum with weights that leave the worst step only."""
    discount: float = Field(1.0, ge=0, le=1)
    """Factor on the score of each step further on."""

    def required(self, group: Group) -> tuple[str, ...]:
        """Steps and scores, where the gate is open."""
        return self.needs if self._opens(group.reward_N) else ()

    def credit(self, group: Group) -> CreditResult:
        """GRPO's advantages, or of each step its value, standardised over the group.

        A step without a finite score closes the gate: all 0, and counted.
        """
        if not self._opens(group.reward_N):
            advantage_N = sequence_advantage("grpo", group.reward_N)
            return _result(spread(advantage_N, group.mask_NT))
        steps = read_steps(group)
        prm_failed = bool(steps.unscored_N.any())
        value_NS = standardised(self._value_NS(steps), steps.present_NS)
        advantage_NT = on_tokens(value_NS, steps.id_NT)
        return _result(advantage_NT, is_open=not prm_failed, prm_failed=prm_failed)

    def _opens(self, reward_N: Tensor) -> bool:
        """At least two verdicts, all equal, and wrong unless any will do."""
        reward_R = reward_N[has_verdict(reward_N)]
        if len(reward_R) < 2 or reward_R.min() < reward_R.max():
            return False
        return self.gate == "any_degenerate" or bool(is_wrong(reward_R).all())

    def _value_NS(self, steps: Steps) -> Tensor:
        """[N, S] float64: meaningless where the rollout has no such step."""
        score_NS = steps.score_NS
        if self.credit_rule == "min":
            logit_NS = (-score_NS / _SOFT_MINIMUM).where(steps.present_NS, -torch.inf)
            score_NS = score_NS * logit_NS.softmax(dim=1)
        value_NS = future_sum(score_NS, self.discount)
        if self.credit_rule == "future_mean":
            return value_NS / future_sum(steps.present_NS.double())
        return value_NS


def _result(
    advantage_NT: Tensor, *, is_open: bool = False, prm_failed: bool = False
) -> CreditResult:
    return CreditResult(
        advantage_NT=advantage_NT,
        metrics={"credit/gate_open": float(is_open), "credit/prm_failed": float(prm_failed)},
    )
