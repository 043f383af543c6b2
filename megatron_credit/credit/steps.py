"""Reasoning steps and what a process reward model (PRM) says of them.

The steps of a rollout are the ids on its trained tokens. Scores of other columns are never read,
nor those of a rollout without a verdict.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_credit.credit.baselines import has_verdict
from megatron_credit.credit.columns import present_columns, trained_ids
from megatron_credit.credit.group import Group

_STD_MIN = 1e-8
"""Below this the steps of a group count as equal."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Steps:
    """The steps of a group with their scores."""

    id_NT: Tensor
    """[N, T] int64: step of each trained token, -1 outside."""
    present_NS: Tensor
    """[N, S] bool: the rollout has this step."""
    score_NS: Tensor
    """[N, S] float64: 0 where there is no such step."""

    @property
    def unscored_N(self) -> Tensor:
        """[N] bool: some step has no finite score, so the PRM failed on this rollout."""
        return ~self.score_NS.isfinite().all(dim=1)


def read_steps(group: Group) -> Steps:
    """The steps of the rollouts that have a verdict."""
    id_NT, score_NS = group.step_id_NT, group.step_score_NS
    assert id_NT is not None and score_NS is not None
    num_steps = score_NS.shape[1]
    trained_NT = group.mask_NT & has_verdict(group.reward_N)[:, None]
    column_NT = trained_ids("step_id_NT", id_NT, trained_NT, num_steps)
    present_NS = present_columns(column_NT, num_steps)
    return Steps(
        id_NT=column_NT,
        present_NS=present_NS,
        score_NS=torch.where(present_NS, score_NS.double(), 0.0),
    )


def future_sum(value_NS: Tensor, discount: float = 1.0) -> Tensor:
    """[N, S]: sum over k >= j of discount^(k - j) times value k; absent steps have value 0."""
    sum_NS = value_NS.clone()
    for step in reversed(range(value_NS.shape[1] - 1)):
        sum_NS[:, step] += discount * sum_NS[:, step + 1]
    return sum_NS


def standardised(value_NS: Tensor, present_NS: Tensor) -> Tensor:
    """[N, S] float64: (value - mean) / population std over all steps of the group, 0 elsewhere.

    All 0 where the std is below 1e-8, and where a step's value is not finite: nothing is guessed.
    """
    standard_NS = torch.zeros_like(value_NS)
    value_J = value_NS[present_NS]
    # The std of a value that is not finite is NaN, and no comparison with NaN holds.
    if len(value_J) and (std := float(value_J.std(correction=0))) >= _STD_MIN:
        standard_NS[present_NS] = (value_J - value_J.mean()) / std
    return standard_NS
