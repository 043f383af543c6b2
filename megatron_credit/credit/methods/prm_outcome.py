"""The outcome baseline of process rewards: one number a rollout from the scores of its steps."""

from collections.abc import Callable
from typing import ClassVar, Literal

import torch
from torch import Tensor

from megatron_credit.credit.baselines import Base, has_verdict, sequence_advantage, spread
from megatron_credit.credit.group import Group
from megatron_credit.credit.method import CreditMethod
from megatron_credit.credit.result import CreditResult
from megatron_credit.credit.steps import Steps, read_steps

Aggregate = Literal["mean", "min", "last", "product"]

_AGGREGATES: dict[Aggregate, Callable[[Tensor], Tensor]] = {
    "mean": torch.mean,
    "min": torch.min,
    "last": lambda score_J: score_J[-1],
    "product": torch.prod,
}


class PrmOutcome(CreditMethod):
    """GRPO whose reward is the PRM's; the verifier says only which rollouts count."""

    name: ClassVar[str] = "prm_outcome"
    needs: ClassVar[tuple[str, ...]] = ("step_id_NT", "step_score_NS")
    aggregate: Aggregate = "mean"
    """How the scores of the steps become one reward."""
    base: Base = "grpo"
    """The group baseline on that reward."""

    def credit(self, group: Group) -> CreditResult:
        """The baseline on the aggregated scores; 0 where a step has no score or there is none."""
        reward_N = self._reward_N(read_steps(group))
        advantage_N = sequence_advantage(self.base, reward_N)
        num_unscored = has_verdict(group.reward_N).sum() - has_verdict(reward_N).sum()
        return CreditResult(
            advantage_NT=spread(advantage_N, group.mask_NT),
            metrics={"credit/unscored_rollouts": float(num_unscored)},
        )

    def _reward_N(self, steps: Steps) -> Tensor:
        """[N] float64: NaN without steps, or with one that has no finite score."""
        reward_N = steps.score_NS.new_full((len(steps.score_NS),), torch.nan)
        usable_N = steps.present_NS.any(dim=1) & ~steps.unscored_N
        for row in usable_N.nonzero()[:, 0].tolist():
            score_J = steps.score_NS[row, steps.present_NS[row]]
            reward_N[row] = _AGGREGATES[self.aggregate](score_J)
        return reward_N
