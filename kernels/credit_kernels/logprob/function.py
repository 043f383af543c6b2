"""Autograd of linear_logprob, around the local statistics and gradients of a backend.

Between the passes it holds a maximum, a sum and an entropy of each token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from credit_kernels.vocab_parallel import LocalStats, VocabShard, finish, reduce


@dataclass(frozen=True, eq=False)
class Incoming:
    """What the backward pass knows of each row.

    The gradient of a row's logits z is onehot grad_logprob + w (factor + (z - max) slope), where
    w = exp(z - max).
    """

    target_R: Tensor
    max_R: Tensor
    grad_logprob_R: Tensor
    factor_R: Tensor
    slope_R: Tensor | None
    """None: nothing comes in through the entropy."""

    @classmethod
    def of(
        cls,
        *,
        target_R: Tensor,
        max_R: Tensor,
        sum_R: Tensor,
        entropy_R: Tensor,
        grad_logprob_R: Tensor,
        grad_entropy_R: Tensor | None,
    ) -> "Incoming":
        """From d logprob / dz = [target] - p and d entropy / dz = -p (log p + entropy).

        The sum of exp(z - max) comes apart from the maximum, beside which its logarithm would lose
        digits.
        """
        factor_R, slope_R = grad_logprob_R, None
        if grad_entropy_R is not None:
            factor_R = factor_R + grad_entropy_R * (entropy_R - sum_R.log())
            slope_R = -grad_entropy_R / sum_R
        return cls(
            target_R=target_R,
            max_R=max_R,
            grad_logprob_R=grad_logprob_R,
            factor_R=-factor_R / sum_R,
            slope_R=slope_R,
        )


@dataclass(frozen=True)
class Backend:
    """How the head of some rows is computed; `head` stands for what `head_of` returns."""

    head_of: Callable[..., Any]
    """(hidden_TH, weight_VH, row_R, shard, temperature, softcap) -> head on the rows row_R."""
    local_stats: Callable[[Any, Tensor, bool], LocalStats]
    """(head, target_R, with_entropy) -> statistics over this rank's columns."""
    gradients: Callable[[Any, Incoming, bool, bool], tuple[Tensor | None, Tensor | None]]
    """(head, incoming, wants_hidden, wants_weight) -> gradients of the rows and of the weight."""


class LinearLogprob(torch.autograd.Function):
    """See `linear_logprob`; entropy_T is zero unless it is asked for."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        target_T: Tensor,
        shard: VocabShard,
        options: tuple[float, float | None],
        with_entropy: bool,
        backend: Backend,
    ) -> tuple[Tensor, Tensor]:
        """Statistics of the rows that are not ignored, scattered back to all rows."""
        row_R = ((target_T >= 0) & (target_T < shard.total)).nonzero()[:, 0]
        target_R = target_T[row_R]
        head = backend.head_of(hidden_TH, weight_VH, row_R, shard, *options)
        # Triton launches on the current device; autograd sets it for the backward pass.
        with torch.cuda.device_of(hidden_TH):
            local = backend.local_stats(head, target_R, with_entropy)
        stats = finish(reduce(local, shard.group))
        ctx.save_for_backward(
            hidden_TH, weight_VH, target_R, row_R, stats.max_T, stats.sum_T, stats.entropy_T
        )
        ctx.options = (shard, options, with_entropy, backend)
        logprob_T = stats.logprob_T.new_zeros(len(target_T)).index_copy_(0, row_R, stats.logprob_T)
        entropy_T = torch.zeros_like(logprob_T)
        if with_entropy:
            entropy_T.index_copy_(0, row_R, stats.entropy_T)
        else:
            ctx.mark_non_differentiable(entropy_T)
        return logprob_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprob_T: Tensor, grad_entropy_T: Tensor) -> tuple:
        """Gradients of hidden and weight, each only where it is wanted."""
        hidden_TH, weight_VH, target_R, row_R, max_R, sum_R, entropy_R = ctx.saved_tensors
        shard, options, with_entropy, backend = ctx.options
        head = backend.head_of(hidden_TH, weight_VH, row_R, shard, *options)
        incoming = Incoming.of(
            target_R=target_R,
            max_R=max_R,
            sum_R=sum_R,
            entropy_R=entropy_R,
            grad_logprob_R=grad_logprob_T[row_R],
            grad_entropy_R=grad_entropy_T[row_R] if with_entropy else None,
        )
        grad_RH, grad_VH = backend.gradients(head, incoming, *ctx.needs_input_grad[:2])
        grad_TH = None
        if grad_RH is not None:
            grad_TH = torch.zeros_like(hidden_TH).index_copy_(0, row_R, grad_RH)
        return grad_TH, grad_VH, None, None, None, None, None
