"""The operations of this package; tests and benchmarks go over the list."""

from collections.abc import Callable
from dataclasses import dataclass

from credit_kernels.logprob import linear_logprob
from credit_kernels.logprob.cases import CASES, Case
from credit_kernels.logprob.reference import linear_logprob_reference


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A public function with the plain computation that it must agree with."""

    name: str
    function: Callable
    reference: Callable
    cases: tuple[Case, ...]


OPERATIONS = (
    Operation(
        name="linear_logprob",
        function=linear_logprob,
        reference=linear_logprob_reference,
        cases=CASES,
    ),
)
