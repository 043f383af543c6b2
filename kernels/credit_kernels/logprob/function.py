"""Autograd of linear_logprob, around the local statistics and gradients of a backend.

Between the passes it holds a maximum, a sum and an entropy of each token. Where the weight is
frozen it holds d logprob / d hidden too, and the backward pass need not make the logits again.
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
    stats_and_unit: Callable[[Any, Tensor, bool], tuple[LocalStats, Tensor]] | None = None
    """The same statistics, bit for bit, and d logprob / d hidden, [R, H] in float32 at least, of a
    head whose columns are all here. None: no logit is left when its normaliser is known."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is computed, apart from the tensors."""

    shard: VocabShard
    temperature: float
    softcap: float | None
    with_entropy: bool
    keeps_unit: bool
    """d logprob / d hidden is made in the forward pass and kept."""


def unit_pays(hidden_TH: Tensor, weight_VH: Tensor, shard: VocabShard, backend: Backend) -> bool:
    """d logprob / d hidden, scaled by what comes in, will be all that the backward pass is asked.

    The weight's gradient mixes the tokens, each scaled by what comes in, and needs the logits once
    more anyway. With a group their normaliser is known only after all chunks are gone.
    """
    wanted = torch.is_grad_enabled() and hidden_TH.requires_grad and not weight_VH.requires_grad
    return wanted and shard.group is None and backend.stats_and_unit is not None


class LinearLogprob(torch.autograd.Function):
    """See `linear_logprob`; entropy_T is zero unless it is asked for."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        target_T: Tensor,
        options: Options,
        backend: Backend,
    ) -> tuple[Tensor, Tensor]:
        """Statistics of the rows that are not ignored, scattered back to all rows."""
        shard = options.shard
        row_R = ((target_T >= 0) & (target_T < shard.total)).nonzero()[:, 0]
        target_R = target_T[row_R]
        head = _head(hidden_TH, weight_VH, row_R, options, backend)
        unit_RH = None
        # Triton launches on the current device; autograd sets it for the backward pass.
        with torch.cuda.device_of(hidden_TH):
            if options.keeps_unit and backend.stats_and_unit is not None:
                local, unit_RH = backend.stats_and_unit(head, target_R, options.with_entropy)
            else:
                local = backend.local_stats(head, target_R, options.with_entropy)
        stats = finish(reduce(local, shard.group))
        row_numbers = (target_R, row_R, stats.max_T, stats.sum_T, stats.entropy_T)
        ctx.save_for_backward(hidden_TH, weight_VH, *row_numbers, unit_RH)
        ctx.settings = (options, backend)
        ctx.set_materialize_grads(False)
        logprob_T = stats.logprob_T.new_zeros(len(target_T)).index_copy_(0, row_R, stats.logprob_T)
        entropy_T = torch.zeros_like(logprob_T)
        if options.with_entropy:
            entropy_T.index_copy_(0, row_R, stats.entropy_T)
        else:
            ctx.mark_non_differentiable(entropy_T)
        return logprob_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprob_T: Tensor | None, grad_entropy_T: Tensor | None) -> tuple:
        """Gradients of hidden and weight, each only where it is wanted."""
        hidden_TH, weight_VH, target_R, row_R, max_R, sum_R, entropy_R, unit_RH = ctx.saved_tensors
        options, backend = ctx.settings
        grad_logprob_R = torch.zeros_like(max_R)
        if grad_logprob_T is not None:
            grad_logprob_R = grad_logprob_T[row_R]
        if unit_RH is not None and grad_entropy_T is None:
            grad_RH, grad_VH = (unit_RH * grad_logprob_R[:, None]).to(hidden_TH.dtype), None
        else:
            incoming = Incoming.of(
                target_R=target_R,
                max_R=max_R,
                sum_R=sum_R,
                entropy_R=entropy_R,
                grad_logprob_R=grad_logprob_R,
                grad_entropy_R=None if grad_entropy_T is None else grad_entropy_T[row_R],
            )
            head = _head(hidden_TH, weight_VH, row_R, options, backend)
            grad_RH, grad_VH = backend.gradients(head, incoming, *ctx.needs_input_grad[:2])
        grad_TH = None
        if grad_RH is not None:
            grad_TH = torch.zeros_like(hidden_TH).index_copy_(0, row_R, grad_RH)
        return grad_TH, grad_VH, None, None, None


def _head(
    hidden_TH: Tensor, weight_VH: Tensor, row_R: Tensor, options: Options, backend: Backend
) -> Any:
    scale = (options.temperature, options.softcap)
    return backend.head_of(hidden_TH, weight_VH, row_R, options.shard, *scale)
