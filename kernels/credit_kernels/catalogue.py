"""The operations of this package; tests and benchmarks go over the list."""

from dataclasses import dataclass

from credit_kernels.logprob.cases import CASES, Case


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A public function and the problems to try it on.

    A case draws its inputs, computes the operation on them and knows the plain computation to
    compare with.
    """

    name: str
    cases: tuple[Case, ...]


OPERATIONS = (Operation(name="linear_logprob", cases=CASES),)
