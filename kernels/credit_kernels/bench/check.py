"""Values and gradients against float64, before anything is timed."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from credit_kernels.bench.methods import Method
from credit_kernels.bench.operations import Compute
from credit_kernels.bench.problem import Inputs, Problem, evaluate

CHECKED_TOKENS = 130
"""More than one row of a kernel's tiles, and no whole number of them."""
EAGER_ERRORS = 4
"""Errors of eager torch that are allowed. A benchmark looks for wrong results; rounding is held to
twice eager torch's by the tests, on problems without a quotient whose error one token decides, as
it does that of the contrast's alpha."""
ROUNDING = 1e-5
"""Part of the largest value."""


@dataclass(frozen=True)
class Truth:
    """The values of a problem in float64, and how far eager torch is from them."""

    inputs: Inputs
    values: list[Tensor]
    eager_errors: list[float]
    """With logits rounded to the inputs' type."""
    float32_errors: list[float]
    """With logits in float32."""

    @classmethod
    def of(cls, problem: Problem) -> "Truth":
        """On fewer tokens than are timed, of which all logits fit into memory."""
        inputs = problem.draw(CHECKED_TOKENS)
        eager = problem.operation.eager
        exact = tuple(value.double() if value.is_floating_point() else value for value in inputs)
        hidden, weight_VH, target_T = (value.detach() for value in exact)
        values = evaluate(eager, problem.with_gradients(hidden, weight_VH, target_T))
        return cls(
            inputs=inputs,
            values=values,
            eager_errors=_errors(evaluate(eager, inputs), values),
            float32_errors=_errors(evaluate(partial(_in_float32, eager), inputs), values),
        )

    def complaint(self, method: Method) -> str | None:
        """Where the method errs far more than eager torch; None if nowhere."""
        values = evaluate(method.compute, self.inputs)
        found = _errors(values, self.values)
        eager = self.eager_errors if method.rounds else self.float32_errors
        for index, (error, theirs) in enumerate(zip(found, eager, strict=True)):
            allowed = EAGER_ERRORS * theirs + self._slack(index, values[index].dtype)
            # NaN is not within what is allowed either.
            if not error <= allowed:
                return f"{self._name(index)} is off by {error:.1e}; allowed is {allowed:.1e}"
        return None

    def _slack(self, index: int, dtype: torch.dtype) -> float:
        """What rounding in another order does, and that of a result in bfloat16."""
        scale = self.values[index].abs().max().item() or 1.0
        is_output = index < len(self.values) - self._num_gradients
        return scale * max(ROUNDING, torch.finfo(dtype).eps if is_output else 0)

    def _name(self, index: int) -> str:
        num_outputs = len(self.values) - self._num_gradients
        if index < num_outputs:
            return f"output {index}"
        return ("the gradient of hidden", "the gradient of the weight")[index - num_outputs]

    @property
    def _num_gradients(self) -> int:
        return sum(value.requires_grad for value in self.inputs)


def _in_float32(
    compute: Compute, hidden: Tensor, weight_VH: Tensor, target_T: Tensor
) -> tuple[Tensor, ...]:
    return compute(hidden.float(), weight_VH.float(), target_T)


def _errors(values: list[Tensor], truth: list[Tensor]) -> list[float]:
    return [
        torch.abs(value.double() - true).max().item()
        for value, true in zip(values, truth, strict=True)
    ]
