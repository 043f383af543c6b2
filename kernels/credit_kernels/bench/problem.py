"""One operation on one head: its inputs, and how it is evaluated."""

from dataclasses import dataclass

import torch
from torch import Tensor

from credit_kernels.bench.operations import Compute, Operation
from credit_kernels.bench.shapes import Head

LOGIT_SPREAD = 2.0
"""Standard deviation of the logits."""
DISTANCE = 0.3
"""Scale of what the teachers' hidden states have besides the student's."""

Inputs = tuple[Tensor, Tensor, Tensor]
"""hidden_TH or hidden_CTH, weight_VH, target_T; the first two require gradients if trained, and the
weight only where it is not frozen."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is computed, on how much, in which type and where."""

    operation: Operation
    head: Head
    tokens: int
    dtype: torch.dtype
    device: torch.device

    def draw(self, tokens: int | None = None) -> Inputs:
        """The same numbers at every call with as many tokens."""
        num_tokens = self.tokens if tokens is None else tokens
        generator = torch.Generator(self.device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=self.dtype, device=self.device)

        hidden = normal(num_tokens, self.head.hidden)
        if self.operation.contexts is not None:
            others = normal(self.operation.contexts, *hidden.shape) * DISTANCE
            others[0] = 0
            hidden = hidden + others
        weight_VH = normal(self.head.vocabulary, self.head.hidden)
        weight_VH *= LOGIT_SPREAD / self.head.hidden**0.5
        target_T = torch.randint(
            self.head.vocabulary, (num_tokens,), generator=generator, device=self.device
        )
        return self.with_gradients(hidden, weight_VH, target_T)

    def with_gradients(self, hidden: Tensor, weight_VH: Tensor, target_T: Tensor) -> Inputs:
        """The same tensors, which require gradients where the operation has them."""
        trained, frozen = self.operation.trained, self.operation.frozen_head
        hidden.requires_grad_(trained)
        return hidden, weight_VH.requires_grad_(trained and not frozen), target_T


def evaluate(compute: Compute, inputs: Inputs) -> list[Tensor]:
    """Outputs and, of a trained operation, the gradients of hidden and weight."""
    outputs = compute(*inputs)
    return [*outputs, *gradients(outputs, inputs)]


def gradients(outputs: tuple[Tensor, ...], inputs: Inputs) -> tuple[Tensor, ...]:
    """Of a sum of the outputs in which every token and output has another weight."""
    wanted = [value for value in inputs if value.requires_grad]
    if not wanted:
        return ()
    weights = [_weights(output, len(inputs[2]), index) for index, output in enumerate(outputs)]
    return torch.autograd.grad(outputs, wanted, weights)


def _weights(output: Tensor, tokens: int, index: int) -> Tensor:
    if output.dim() == 0:
        # A mean, which shall have gradients of the size that a sum has.
        return torch.full_like(output, tokens)
    ramp_T = torch.linspace(-1, 1, tokens, dtype=output.dtype, device=output.device)
    return ramp_T + index
