"""Values of the states between the segments of a chain of thought, from answer probes (RREDCoT).

A state is the prompt with the first m segments; how likely the group's answers are if thinking
stops there is its value. All in log space: an answer may have log-prob -1e4 in every state.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_credit.credit.baselines import has_verdict, is_verified
from megatron_credit.credit.columns import present_columns, trained_ids
from megatron_credit.credit.group import Group

Values = Literal["pooled", "own", "enumerated"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Probes:
    """The segments of a group and what its answer probes say; P = M + 1 states and columns."""

    column_NT: Tensor
    """[N, T] int64: segment of each trained token, M on answer tokens, -1 outside."""
    present_NP: Tensor
    """[N, P] bool: the row has such a segment, or answer tokens."""
    last_N1: Tensor
    """[N, 1] int64: the row's last state, which is its number of segments."""
    probed_N: Tensor
    """[N] bool: has a verdict and a finite probe of each answer in each of its states."""
    logprob_NPY: Tensor
    """[N, P, Y] float64: log p(answer given state); only a row's own states mean something."""
    answer_N: Tensor
    """[N] int64: column of the row's own parsed answer; -1 = none, or no verdict."""

    @property
    def state_NP(self) -> Tensor:
        """[N, P] bool: the states of each probed row."""
        return self.probed_N[:, None] & _up_to(self.last_N1, self.present_NP.shape[1])

    @property
    def earning_NP(self) -> Tensor:
        """[N, P] bool: the segments of each probed row, in the last column its answer tokens."""
        has_answer_N1 = self.present_NP[:, -1:] & self.probed_N[:, None]
        return torch.cat([self.state_NP[:, 1:], has_answer_N1], dim=1)

    @property
    def count_Y(self) -> Tensor:
        """[Y] int64: how many rollouts with a verdict gave each answer."""
        return self.answer_N[self.answer_N >= 0].bincount(minlength=self.logprob_NPY.shape[2])

    def at_last(self, value_NP: Tensor) -> Tensor:
        """[N, 1]: each row's value in its last state."""
        return value_NP.gather(1, self.last_N1)


def read_probes(group: Group) -> Probes:
    """ValueError for a segment without a state, or a parsed answer without a column."""
    id_NT, logprob_NPY = group.segment_id_NT, group.answer_logprob_NMY
    assert id_NT is not None and logprob_NPY is not None
    num_states = logprob_NPY.shape[1]
    if num_states == 0:
        raise ValueError("answer_logprob_NMY has no state; expected at least the bare prompt")
    valid_N = has_verdict(group.reward_N)
    trained_NT = group.mask_NT & valid_N[:, None]
    column_NT = trained_ids("segment_id_NT", id_NT, trained_NT, num_states)
    present_NP = present_columns(column_NT, num_states)
    # Segment m, counted from 0, leads to state m + 1; the last column are the answer tokens.
    reached_NP = F.pad(present_NP[:, :-1], (1, 0))
    last_N1 = (reached_NP * torch.arange(num_states, device=id_NT.device)).amax(1, keepdim=True)
    finite_NP = logprob_NPY.isfinite().all(dim=2)
    return Probes(
        column_NT=column_NT,
        present_NP=present_NP,
        last_N1=last_N1,
        probed_N=valid_N & (finite_NP | ~_up_to(last_N1, num_states)).all(dim=1),
        logprob_NPY=logprob_NPY.double(),
        answer_N=_answers(group, valid_N),
    )


def state_values(group: Group, probes: Probes, values: Values) -> Tensor:
    """[N, P] float64 in [0, 1]: the value of each state; 0 where there is no probe, and for all
    where no rollout is verified."""
    if not is_verified(group.reward_N).any():
        return torch.zeros_like(probes.state_NP, dtype=torch.float64)
    value_NP = _LOG_VALUES[values](group, probes).clamp(max=0).exp()
    return value_NP.where(probes.state_NP, 0.0)


def _up_to(last_N1: Tensor, num_states: int) -> Tensor:
    return torch.arange(num_states, device=last_N1.device) <= last_N1


def _answers(group: Group, valid_N: Tensor) -> Tensor:
    index_N, logprob_NPY = group.answer_index_N, group.answer_logprob_NMY
    assert index_N is not None and logprob_NPY is not None
    answer_N = index_N.long().where(valid_N & (index_N >= 0), -1)
    num_answers = logprob_NPY.shape[2]
    if (answer_N >= num_answers).any():
        raise ValueError(
            f"answer_index_N has {int(answer_N.max())}, but answer_logprob_NMY has {num_answers} "
            f"answers; indices count them from 0, -1 means none"
        )
    return answer_N


def _pooled(group: Group, probes: Probes) -> Tensor:
    """log of the mean over the given answers of U(y) p(y | state) / (p(y) in the last states)."""
    num_probed = max(int(probes.probed_N.sum()), 1)
    num_given = max(int(probes.count_Y.sum()), 1)
    end_NY = probes.logprob_NPY.take_along_dim(probes.last_N1[:, :, None], dim=1)[:, 0]
    log_mean_Y = end_NY[probes.probed_N].logsumexp(dim=0) - math.log(num_probed)
    log_weight_Y = (_utility(group, probes) * probes.count_Y / num_given).log()
    return (probes.logprob_NPY - log_mean_Y + log_weight_Y).logsumexp(dim=2)


def _own(group: Group, probes: Probes) -> Tensor:
    """log of R p(own answer | state) / p(own answer | last state); of 0 without an own answer."""
    # One more answer in front, for the rows that have none.
    padded_NPY = F.pad(probes.logprob_NPY, (1, 0))
    own_NP = padded_NPY.take_along_dim(probes.answer_N[:, None, None] + 1, dim=2)[:, :, 0]
    reward_N = group.reward_N.double().where(probes.answer_N >= 0, 0.0)
    return own_NP - probes.at_last(own_NP) + reward_N.clamp(min=0).log()[:, None]


def _enumerated(group: Group, probes: Probes) -> Tensor:
    """log of the sum over the distinct correct answers of p(y | state)."""
    correct_Y = _utility(group, probes) >= 0.5
    return probes.logprob_NPY.where(correct_Y, -torch.inf).logsumexp(dim=2)


_LOG_VALUES: dict[Values, Callable[[Group, Probes], Tensor]] = {
    "pooled": _pooled,
    "own": _own,
    "enumerated": _enumerated,
}


def _utility(group: Group, probes: Probes) -> Tensor:
    """[Y] float64: the verdict of each answer that a rollout with a verdict gave, else 0."""
    assert group.utility_Y is not None
    utility_Y = group.utility_Y.double().where(probes.count_Y > 0, 0.0)
    strange = utility_Y[~((utility_Y >= 0) & (utility_Y <= 1))]
    if len(strange):
        raise ValueError(
            f"utility_Y has {float(strange[0])} for an answer of the group; expected its verdict, "
            f"between 0 and 1"
        )
    return utility_Y
