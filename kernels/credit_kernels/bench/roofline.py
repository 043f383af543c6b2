"""The work that an operation cannot do without, and the least time that it takes on a machine."""

from dataclasses import dataclass

from credit_kernels.bench.machine import Ceilings
from credit_kernels.bench.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is compulsory: whatever a method computes or moves besides counts against it."""

    flops: int
    """Of matrix products: one of 2 T H V a context, and one more for the gradient of the student's
    hidden states and one for the weight's."""
    bytes: int
    """Inputs read once in each pass, gradients written; outputs are small beside them."""

    @property
    def intensity(self) -> float:
        """Operations for each byte."""
        return self.flops / self.bytes

    def attainable_s(self, ceilings: Ceilings) -> float:
        """Seconds at the ceilings, products and memory at the same time."""
        return max(self.flops / ceilings.flop_per_s, self.bytes / ceilings.bytes_per_s)


def work_of(problem: Problem) -> Work:
    """Of the forward pass and, where it is trained, the backward pass."""
    head, contexts = problem.head, problem.operation.contexts or 1
    product = 2 * problem.tokens * head.hidden * head.vocabulary
    student = problem.tokens * head.hidden * problem.dtype.itemsize
    weight = head.vocabulary * head.hidden * problem.dtype.itemsize
    flops, traffic = contexts * product, contexts * student + weight
    if problem.operation.trained:
        flops += product
        traffic += 2 * student + weight
        if not problem.operation.frozen_head:
            flops += product
            traffic += weight
    return Work(flops=flops, bytes=traffic)
