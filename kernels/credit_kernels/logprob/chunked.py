"""The `torch` backend: the head tile by tile, and once more tile by tile in the backward pass."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from credit_kernels.logprob.function import Backend, Incoming
from credit_kernels.logprob.head import Head, exp_
from credit_kernels.matmul import matmul_nt
from credit_kernels.vocab_parallel import LOWEST, LocalStats

TileGradient = Callable[[slice, slice, Tensor], Tensor]
"""(rows, column block, weight of the block) -> gradient of scaled @ weight.T in that tile."""


def local_stats(head: Head, target_R: Tensor, with_entropy: bool) -> LocalStats:
    """Statistics over this rank's columns, merged over the tiles as they come."""
    return _stats(head, target_R, with_entropy, None)


def stats_and_unit(head: Head, target_R: Tensor, with_entropy: bool) -> tuple[LocalStats, Tensor]:
    """The same and d logprob / d hidden, [R, H] in the computing type, from one pass."""
    unit_RH = torch.zeros_like(head.scaled_RH)
    stats = _stats(head, target_R, with_entropy, unit_RH)
    column_R = target_R - head.start
    for rows in head.row_blocks():
        target_RH = head.weight_VH[column_R[rows]].to(unit_RH.dtype)
        cap_slope_R = head.cap_slope(stats.target_T[rows])
        if cap_slope_R is not None:
            target_RH.mul_(cap_slope_R[:, None])
        unit_RH[rows] = target_RH.sub_(unit_RH[rows].div_(stats.sum_T[rows][:, None]))
    return stats, unit_RH.mul_(head.scale)


def _stats(head: Head, target_R: Tensor, with_entropy: bool, mean_RH: Tensor | None) -> LocalStats:
    """The statistics; `mean` becomes sum_v exp(z - max) d z / d (scaled @ weight.T) weight."""
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
            cap_slope_RC = None if mean_RH is None else head.cap_slope(tile_RC)
            moment_of_rows_R = moment_R[rows] if with_entropy else None
            exp_RC, scale_R = add_tile(tile_RC, max_R[rows], sum_R[rows], moment_of_rows_R)
            if mean_RH is not None:
                slope_RC = exp_RC if cap_slope_RC is None else exp_RC.mul_(cap_slope_RC)
                part_RH = matmul_nt(slope_RC, weight_CH.T)
                mean_RH[rows] = part_RH.addcmul_(mean_RH[rows], scale_R[:, None])
    return LocalStats(max_R, sum_R, moment_R, logit_R, owned_R)


def add_tile(
    tile_RC: Tensor, max_R: Tensor, sum_R: Tensor, moment_R: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Merges a tile into the running statistics, in place; the tile is overwritten.

    exp(z - max) of the tile, and what sums relative to the maximum before are to be scaled by.
    """
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
    return weight_RC, scale_R


def gradients(
    head: Head, tile_gradient: TileGradient, wants_hidden: bool, wants_weight: bool
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
            grad_RC = tile_gradient(rows, block, weight_CH)
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


def _head_gradients(
    head: Head, incoming: Incoming, wants_hidden: bool, wants_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    return gradients(head, partial(_product_gradient, head, incoming), wants_hidden, wants_weight)


BACKEND = Backend(Head.of, local_stats, _head_gradients, stats_and_unit)
