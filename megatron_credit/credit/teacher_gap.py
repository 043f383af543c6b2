"""Advantages weighed by how much likelier a token is under one teacher than under another.

The rule of CEPO (2605.19436); RLSD (2604.03128) is its case of the policy as the other teacher.
"""

import torch
from torch import Tensor

from megatron_credit.credit.baselines import Base, has_verdict, sequence_advantage, spread
from megatron_credit.credit.evidence import has_evidence
from megatron_credit.credit.group import Group
from megatron_credit.credit.result import CreditResult
from megatron_credit.credit.summary import mean, weight_metrics

_MAX_EXPONENT = 20.0


def decayed(start: float, *, step: int, num_steps: float) -> float:
    """`start` at step 1, falling linearly to 0 at step 1 + num_steps."""
    return start * max(0.0, 1 - (step - 1) / num_steps)


def unweighed(base: Base, group: Group) -> CreditResult:
    """The baseline alone, when the schedule has ended."""
    advantage_N = sequence_advantage(base, group.reward_N)
    return CreditResult(
        advantage_NT=spread(advantage_N, group.mask_NT), metrics={"credit/mixing": 0.0}
    )


def weighed_by_gap(
    base: Base, group: Group, negative_NT: Tensor, *, mixing: float, bound: float
) -> CreditResult:
    """A times (1 - mixing) + mixing x clip(w, 1 - bound, 1 + bound), with w = exp(sign(A) gap).

    The gap is the group's positive log-prob minus the negative one. A row that lacks either keeps
    A.
    """
    advantage_N = sequence_advantage(base, group.reward_N)
    positive_NT = group.positive_logprob_NT
    assert positive_NT is not None
    evidence_N = has_evidence(group.mask_NT, positive_NT, negative_NT)
    gap_NT = log_ratio(positive_NT, negative_NT, group.mask_NT & evidence_N[:, None])
    exponent_NT = advantage_N.sign()[:, None] * gap_NT
    raw_NT = exponent_NT.clamp(-_MAX_EXPONENT, _MAX_EXPONENT).exp()
    # As a change of 1, so that no gap leaves A as it is, bit for bit.
    factor_NT = 1 + mixing * (raw_NT.clamp(1 - bound, 1 + bound) - 1)
    valid_N = has_verdict(group.reward_N)
    weighed_NT = group.mask_NT & (evidence_N & (advantage_N != 0))[:, None]
    return CreditResult(
        advantage_NT=spread(advantage_N, group.mask_NT) * factor_NT,
        metrics={
            **weight_metrics(factor_NT[weighed_NT]),
            "credit/weight_clip_low": mean(raw_NT[weighed_NT] < 1 - bound),
            "credit/weight_clip_high": mean(raw_NT[weighed_NT] > 1 + bound),
            "credit/mixing": mixing,
            "credit/no_evidence_rollouts": float((valid_N & ~evidence_N).sum()),
        },
    )


def log_ratio(numerator_NT: Tensor, denominator_NT: Tensor, usable_NT: Tensor) -> Tensor:
    """[N, T] float64: the difference of two log-probs where they are usable, else 0."""
    return torch.where(usable_NT, numerator_NT.double() - denominator_NT.double(), 0.0)
