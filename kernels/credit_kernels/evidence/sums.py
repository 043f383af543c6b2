"""Weighted sums of the variables of a contrast, in float64 across tiles and ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from credit_kernels.evidence.contrast import Contrast

RIDGE = 1e-8
"""Added to the variance that alpha is divided by."""


@dataclass(frozen=True, eq=False)
class Spread:
    """Means and covariances of variables under the student's probabilities, float64."""

    weight_T: Tensor
    """Sum of the probabilities: 1 over a softmax's own columns, less on a support."""
    first_XT: Tensor
    """Sums of probability times variable."""
    covariance_XXT: Tensor
    """Sums of probability times two variables, less the product of their first sums."""

    @property
    def additive(self) -> tuple[Tensor, ...]:
        """What adds up over columns."""
        return self.weight_T, self.first_XT, self.covariance_XXT + _square(self.first_XT)

    @classmethod
    def of_additive(cls, weight_T: Tensor, first_XT: Tensor, second_XXT: Tensor) -> "Spread":
        """From what adds up."""
        return cls(weight_T, first_XT, second_XXT - _square(first_XT))

    def mapped(self, map_XXT: Tensor, scale_T: Tensor) -> "Spread":
        """For other variables map @ x, under probabilities scale times as large."""
        _, first_XT, second_XXT = self.additive
        return Spread.of_additive(
            scale_T * self.weight_T,
            scale_T * torch.einsum("xyt,yt->xt", map_XXT, first_XT),
            scale_T * torch.einsum("xyt,yzt,wzt->xwt", map_XXT, second_XXT, map_XXT),
        )

    def alpha_T(self, num_variables: int) -> Tensor:
        """What takes the nuisance out of the task; 0 without a nuisance."""
        if num_variables == 1:
            return torch.zeros_like(self.weight_T)
        return self.covariance_XXT[0, 1] / (self.covariance_XXT[1, 1] + RIDGE)

    def mean_T(self, alpha_T: Tensor, num_variables: int) -> Tensor:
        """Of task - alpha nuisance."""
        return without(alpha_T, self.first_XT[:num_variables])

    def cost_T(self, alpha_T: Tensor, num_variables: int) -> Tensor:
        """Variance of task - alpha nuisance."""
        cost_XT = without(alpha_T, self.covariance_XXT[:num_variables, :num_variables])
        return without(alpha_T, cost_XT).clamp_min(0)


@dataclass(frozen=True, eq=False)
class ContrastSums:
    """Sums over columns that follow from a contrast; all float64."""

    contrast: Contrast
    roles: tuple[int, ...]
    """Places of the contrast's roles among the contexts."""
    spread: Spread

    @property
    def others(self) -> tuple[Tensor, ...]:
        """The fields of the subclass, which add up over columns; T last."""
        raise NotImplementedError

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All fields, T last."""
        spread = self.spread
        return spread.weight_T, spread.first_XT, spread.covariance_XXT, *self.others

    @property
    def additive(self) -> tuple[Tensor, ...]:
        """What adds up over columns, T last."""
        return *self.spread.additive, *self.others

    def offsets_2T(self, alpha_T: Tensor) -> Tensor:
        """What multiplies p in the gradients of the reference and of the evidence."""
        raise NotImplementedError

    def of_tensors(self, tensors: Sequence[Tensor]) -> Self:
        """The same contrast with other fields."""
        return type(self)(self.contrast, self.roles, Spread(*tensors[:3]), *tensors[3:])

    def of_additive(self, tensors: Sequence[Tensor]) -> Self:
        """The same contrast, from what adds up."""
        spread = Spread.of_additive(*tensors[:3])
        return type(self)(self.contrast, self.roles, spread, *tensors[3:])

    def alpha_T(self) -> Tensor:
        """How much of the nuisance is taken from the task."""
        return self.spread.alpha_T(self.contrast.num_variables())


def without(alpha_T: Tensor, variables_XT: Tensor) -> Tensor:
    """task - alpha nuisance, or the task where there is no nuisance; X first."""
    if len(variables_XT) == 1:
        return variables_XT[0]
    return variables_XT[0] - alpha_T * variables_XT[1]


def spread_of(
    prob_RV: Tensor, variables: list[Tensor], num_variables: int, on_support: bool
) -> Spread:
    """Spread over the columns; the variables are overwritten.

    Centred on their means before they are squared, and the task on its regression on the nuisance:
    a student that is sure of its token, or a task that is nearly the nuisance, cost no digits.
    """
    # 1 exactly where it is: a rounded sum would stay behind when the squares of the means cancel.
    weight_R = prob_RV.new_ones(len(prob_RV), dtype=torch.float64)
    if on_support:
        weight_R = prob_RV.sum(-1).double()
    divisor_R = weight_R.clamp_min(torch.finfo(prob_RV.dtype).tiny)
    means = [_dot(prob_RV, x_RV) / divisor_R for x_RV in variables]
    for x_RV, mean_R in zip(variables, means, strict=True):
        x_RV.sub_(mean_R.to(x_RV.dtype)[:, None])
    mean_XR = torch.stack(means).to(prob_RV.dtype).double()
    centred_XXR = _products(prob_RV, variables)
    if num_variables == 2:
        centred_XXR[0, 0] = _regressed(prob_RV, variables, centred_XXR)
    return Spread(
        weight_T=weight_R,
        first_XT=weight_R * mean_XR,
        covariance_XXT=centred_XXR + weight_R * (1 - weight_R) * _square(mean_XR),
    )


def _regressed(prob_RV: Tensor, variables: list[Tensor], centred_XXR: Tensor) -> Tensor:
    """The task's centred square, made of that of its regression on the nuisance."""
    task_RV, nuisance_RV = variables[:2]
    slope_R = (centred_XXR[0, 1] / (centred_XXR[1, 1] + RIDGE)).to(prob_RV.dtype)
    task_RV.addcmul_(slope_R[:, None], nuisance_RV, value=-1)
    rest_R = _dot(prob_RV * task_RV, task_RV)
    slope_R = slope_R.double()
    return rest_R + slope_R * (2 * centred_XXR[0, 1] - slope_R * centred_XXR[1, 1])


def combine(coefficients: Sequence[float], tensors: Sequence[Tensor]) -> Tensor:
    """Sum of coefficient times tensor; a new tensor."""
    terms = [pair for pair in zip(coefficients, tensors, strict=True) if pair[0]]
    total = terms[0][1] * terms[0][0]
    for coefficient, tensor in terms[1:]:
        total.add_(tensor, alpha=coefficient)
    return total


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """[S, T]: one row for every number of a token."""
    return torch.cat([t.reshape(t.shape[:-1].numel(), t.shape[-1]) for t in tensors])


def unpack(packed_ST: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that were packed."""
    sizes = [tensor.shape[:-1].numel() for tensor in like]
    parts = packed_ST.split(sizes)
    return [part.reshape(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _square(first_XT: Tensor) -> Tensor:
    return first_XT[:, None] * first_XT


def _dot(a_RV: Tensor, b_RV: Tensor) -> Tensor:
    return (a_RV * b_RV).sum(-1).double()


def _products(prob_RV: Tensor, variables: list[Tensor]) -> Tensor:
    """[X, X, R] sums of prob x y."""
    num = len(variables)
    sum_XXR = prob_RV.new_empty(num, num, len(prob_RV), dtype=torch.float64)
    for x in range(num):
        weighted_RV = prob_RV * variables[x]
        for y in range(x, num):
            sum_XXR[x, y] = sum_XXR[y, x] = _dot(weighted_RV, variables[y])
    return sum_XXR
