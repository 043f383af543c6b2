"""What credit says about a known wrong step: pure functions of numbers.

A measure is NaN where it means nothing, such as a share of no credit at all; means leave it out.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

DRAWS = 2000
LOW, HIGH = 0.025, 0.975
"""Ends of a 95 % interval."""


@dataclass(frozen=True)
class Located:
    """How one response's credit points at the culprit, its first wrong step."""

    mass: float
    """Share of the absolute credit that falls on the culprit's tokens."""
    before: float
    """Share that falls on the steps before it, which are right."""
    rank: float
    """Place of the culprit among the steps by mean absolute credit: 1 is the highest; steps that
    tie share the mean of their places."""
    first: float
    """1 where the culprit alone has the highest; with k others that tie, 1 / (k + 1)."""
    auc: float
    """Chance that a token of the culprit has more than one of the other tokens, ties half."""
    praise: float
    """Share of the credit above 0, praise for a wrong response, that falls on the culprit."""
    uniform: float
    """The culprit's share of the tokens: the mass of credit that is the same for all."""


def locate(credit_T: Tensor, step_T: Tensor, culprit: int) -> Located:
    """The measures of one response; `step_T` has the step of each token, from 0."""
    credit_T = credit_T.double()
    size_T, culprit_T = credit_T.abs(), step_T == culprit
    uniform = culprit_T.double().mean().item()
    if not (credit_T.isfinite().all() and size_T.any()):
        return Located(*[math.nan] * 6, uniform=uniform)
    rank, first = _place(size_T, step_T, culprit)
    return Located(
        mass=share(size_T, culprit_T),
        before=share(size_T, step_T < culprit),
        rank=rank,
        first=first,
        auc=detection(size_T, culprit_T),
        praise=share(credit_T.clamp(min=0), culprit_T),
        uniform=uniform,
    )


def share(size_T: Tensor, chosen_T: Tensor) -> float:
    """The chosen tokens' part of the sum; NaN where that is 0."""
    total = size_T.sum().item()
    return size_T[chosen_T].sum().item() / total if total else math.nan


def detection(score_T: Tensor, culprit_T: Tensor) -> float:
    """Area under the ROC curve of the score; NaN where all tokens are on one side."""
    if culprit_T.all() or not culprit_T.any():
        return math.nan
    inside_C1, outside_O = score_T[culprit_T][:, None], score_T[~culprit_T]
    won_CO = (inside_C1 > outside_O).double() + 0.5 * (inside_C1 == outside_O).double()
    return won_CO.mean().item()


def _place(size_T: Tensor, step_T: Tensor, culprit: int) -> tuple[float, float]:
    steps = step_T.unique().tolist()
    means = {step: size_T[step_T == step].mean().item() for step in steps}
    own = means[culprit]
    higher = sum(mean > own for mean in means.values())
    ties = sum(mean == own for mean in means.values()) - 1
    return 1 + higher + ties / 2, 0.0 if higher else 1 / (1 + ties)


@dataclass(frozen=True)
class Estimate:
    """A mean over responses with its 95 % interval over prompts."""

    mean: float
    low: float
    high: float
    count: int
    """Responses in which the measure means something."""


def estimate(value_R: Tensor, group_R: Tensor, *, seed: int, draws: int = DRAWS) -> Estimate:
    """The mean of the values that are not NaN; the interval is a bootstrap over groups.

    `group_R` numbers the prompt of each response: those of a prompt are drawn together.
    """
    known_R = ~value_R.isnan()
    value_R, group_R = value_R[known_R].double(), group_R[known_R]
    if not len(value_R):
        return Estimate(math.nan, math.nan, math.nan, 0)
    groups, place_R = group_R.unique(return_inverse=True)
    sum_G = torch.zeros(len(groups), dtype=torch.float64).index_add(0, place_R, value_R)
    count_G = place_R.bincount().double()
    generator = torch.Generator().manual_seed(seed)
    drawn_DG = torch.randint(len(groups), (draws, len(groups)), generator=generator)
    mean_D = sum_G[drawn_DG].sum(dim=1) / count_G[drawn_DG].sum(dim=1)
    ends = mean_D.quantile(torch.tensor([LOW, HIGH], dtype=torch.float64)).tolist()
    return Estimate(value_R.mean().item(), ends[0], ends[1], len(value_R))
