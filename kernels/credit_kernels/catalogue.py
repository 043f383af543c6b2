"""The operations of this package; tests and benchmarks go over the list."""

from collections.abc import Sequence
from dataclasses import dataclass

from credit_kernels.divergence import cases as divergence
from credit_kernels.evidence import cases as evidence
from credit_kernels.logprob import cases as logprob


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A public function and the problems to try it on.

    A case draws its inputs, computes the operation on them and knows the plain computation to
    compare with.
    """

    name: str
    cases: Sequence[logprob.Case]
    backends: tuple[str, ...]


OPERATIONS = (
    Operation(name="linear_logprob", cases=logprob.CASES, backends=("torch", "rows", "tiles")),
    # Its cases compute both, evidence_stats without gradient.
    Operation(name="evidence_stats and evidence_loss", cases=evidence.CASES, backends=("torch",)),
    Operation(name="divergence_loss", cases=divergence.CASES, backends=("torch",)),
)
