"""The `torch` backend: the head tile by tile, and once more tile by tile in the backward pass.

Between the passes it holds a maximum, a sum and an entropy of each token.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from credit_kernels.logprob.head import Head, exp_
from credit_kernels.matmul import matmul_nt
from credit_kernels.vocab_parallel import LOWEST, LocalStats, VocabShard, finish, reduce


class LinearLogprob(torch.autograd.Function):
    """See `linear_logprob`; entropy_T is zero unless it is asked for."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        target_T: Tensor,
        shard: VocabShard,
        temperature: float,
        softcap: float | None,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        """Statistics of the rows that are not ignored, scattered back to all rows."""
        row_R = ((target_T >= 0) & (target_T < shard.total)).nonzero()[:, 0]
        target_R = target_T[row_R]
        head = Head.of(hidden_TH, weight_VH, row_R, shard, temperature, softcap)
        stats = finish(reduce(local_stats(head, target_R, with_entropy), shard.group))
        ctx.save_for_backward(
            hidden_TH, weight_VH, target_R, row_R, stats.max_T, stats.sum_T, stats.entropy_T
        )
        ctx.options = (shard, temperature, softcap, with_entropy)
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
        shard, temperature, softcap, with_entropy = ctx.options
        head = Head.of(hidden_TH, weight_VH, row_R, shard, temperature, softcap)
        incoming = Incoming.of(
            target_R=target_R,
            max_R=max_R,
            sum_R=sum_R,
            entropy_R=entropy_R,
            grad_logprob_R=grad_logprob_T[row_R],
            grad_entropy_R=grad_entropy_T[row_R] if with_entropy else None,
        )
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_RH, grad_VH = gradients(head, incoming, wants_hidden, wants_weight)
        grad_TH = None
        if grad_RH is not None:
            grad_TH = torch.zeros_like(hidden_TH).index_copy_(0, row_R, grad_RH)
        return grad_TH, grad_VH, None, None, None, None, None


def local_stats(head: Head, target_R: Tensor, with_entropy: bool) -> LocalStats:
    """Statistics over this rank's columns, merged over the tiles as they come."""
    num_rows = len(head.scaled_RH)
    max_R = head.scaled_RH.new_full((num_rows,), LOWEST)
    sum_R, moment_R, logit_R = head.scaled_RH.new_zeros(3, num_rows)
    owned_R = torch.zeros_like(target_R, dtype=torch.bool)
    for block, weight_CH in head.column_blocks():
        for rows in head.row_blocks():
            tile_RC = head.logits(rows, weight_CH)
            column_R1, owned_R1 = head.target_column(target_R[rows], block)
            logit_R[rows] += tile_RC.gather(1, column_R1).where(owned_R1, 0)[:, 0]
            owned_R[rows] |= owned_R1[:, 0]
            _add_tile(tile_RC, max_R[rows], sum_R[rows], moment_R[rows] if with_entropy else None)
    return LocalStats(max_R, sum_R, moment_R, logit_R, owned_R)


def _add_tile(tile_RC: Tensor, max_R: Tensor, sum_R: Tensor, moment_R: Tensor | None) -> None:
    """Merges a tile into the running statistics, in place; the tile is overwritten."""
    new_max_R = torch.maximum(max_R, tile_RC.amax(-1))
    shift_R = max_R - new_max_R
    scale_R = shift_R.exp()
    tile_RC.sub_(new_max_R[:, None])
    if moment_R is None:
        weight_RC = exp_(tile_RC)
    else:
        weight_RC = exp_(tile_RC.clone())
        moment_R.addcmul_(shift_R, sum_R).mul_(scale_R).add_(tile_RC.mul_(weight_RC).sum(-1))
    sum_R.mul_(scale_R).add_(weight_RC.sum(-1))
    max_R.copy_(new_max_R)


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


def gradients(
    head: Head, incoming: Incoming, wants_hidden: bool, wants_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the chosen hidden rows and of the weight, summed in the computing type."""
    row_blocks = head.row_blocks()
    grad_RH = torch.zeros_like(head.scaled_RH) if wants_hidden else None
    grad_VH = torch.zeros_like(head.weight_VH) if wants_weight else None
    # Hidden states as the right-hand side of the weight's gradient wants them, made once.
    hidden_HR = [head.scaled_RH[rows].T.contiguous() for rows in row_blocks if wants_weight]
    for block, weight_CH in head.column_blocks():
        grad_HC = weight_CH.new_zeros(weight_CH.shape[::-1]) if wants_weight else None
        for index, rows in enumerate(row_blocks):
            grad_RC = _product_gradient(head, incoming, rows, block, weight_CH)
            if grad_RH is not None:
                grad_RH[rows] += matmul_nt(grad_RC, weight_CH.T)
            if grad_HC is not None:
                grad_HC += matmul_nt(hidden_HR[index], grad_RC.T)
        if grad_VH is not None and grad_HC is not None:
            grad_VH[block] = grad_HC.T
    if grad_RH is not None:
        grad_RH = grad_RH.mul_(head.scale).to(head.weight_VH.dtype)
    return grad_RH, grad_VH


def _product_gradient(
    head: Head, incoming: Incoming, rows: slice, block: slice, weight_CH: Tensor
) -> Tensor:
    """Gradient of scaled @ weight.T in one tile, whose logits are made again for it."""
    tile_RC = head.logits(rows, weight_CH)
    cap_slope_RC = head.cap_slope(tile_RC)
    factor_R1 = incoming.factor_R[rows][:, None]
    tile_RC.sub_(incoming.max_R[rows][:, None])
    if incoming.slope_R is None:
        exp_(tile_RC).mul_(factor_R1)
    else:
        weight_RC = exp_(tile_RC.clone())
        tile_RC.mul_(incoming.slope_R[rows][:, None]).add_(factor_R1).mul_(weight_RC)
    column_R1, owned_R1 = head.target_column(incoming.target_R[rows], block)
    grad_logprob_R1 = incoming.grad_logprob_R[rows][:, None]
    tile_RC.scatter_add_(1, column_R1, grad_logprob_R1.where(owned_R1, 0))
    return tile_RC if cap_slope_RC is None else tile_RC.mul_(cap_slope_RC)
