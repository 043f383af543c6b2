"""The `torch` backend: tiles of logits in one reused buffer, recomputed in the backward pass.

A tile stays in cache while the element-wise passes go over it. Only a
maximum, a sum and an entropy of each token are kept for the backward pass.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from credit_kernels.vocab_parallel import LOWEST, LocalStats, VocabShard, finish, reduce

TILE_TOKENS = 1024
TILE_COLUMNS = 512


class LinearLogprob(torch.autograd.Function):
    """See `linear_logprob`; entropy_T is empty unless it is asked for."""

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
        head = Head.of(hidden_TH, weight_VH, row_R, shard, temperature, softcap)
        local = local_stats(head, target_T[row_R], with_entropy)
        stats = finish(reduce(local, shard.group))
        ctx.save_for_backward(
            hidden_TH, weight_VH, target_T[row_R], row_R, stats.max_T, stats.sum_T, stats.entropy_T
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
        incoming = Incoming(
            target_R=target_R,
            max_R=max_R,
            sum_R=sum_R,
            entropy_R=entropy_R if with_entropy else None,
            grad_logprob_R=grad_logprob_T[row_R],
            grad_entropy_R=grad_entropy_T[row_R] if with_entropy else None,
        )
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_RH, grad_VH = gradients(head, incoming, wants_hidden, wants_weight)
        grad_TH = None
        if grad_RH is not None:
            grad_TH = torch.zeros_like(hidden_TH).index_copy_(0, row_R, grad_RH)
        return grad_TH, grad_VH, None, None, None, None, None


@dataclass(frozen=True, eq=False)
class Head:
    """The rows and columns that count, and how their logits are made."""

    scaled_RH: Tensor
    """Hidden states in the computing type; over the temperature unless a cap comes between."""
    weight_VH: Tensor
    columns: int
    start: int
    scale: float
    """What hidden was multiplied by to give `scaled_RH`."""
    softcap: float | None
    cap_scale: float
    """1 / temperature where it is applied after the cap."""

    @classmethod
    def of(
        cls,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        row_R: Tensor,
        shard: VocabShard,
        temperature: float,
        softcap: float | None,
    ) -> "Head":
        """The head on the chosen rows; ignored rows are not even read, they may be NaN."""
        compute = torch.promote_types(hidden_TH.dtype, torch.float32)
        scale = 1 / temperature if softcap is None else 1.0
        chosen_RH = hidden_TH if len(row_R) == len(hidden_TH) else hidden_TH[row_R]
        return cls(
            scaled_RH=chosen_RH.to(compute) * scale if scale != 1 else chosen_RH.to(compute),
            weight_VH=weight_VH,
            columns=shard.num_columns,
            start=shard.start,
            scale=scale,
            softcap=softcap,
            cap_scale=1 / temperature,
        )

    def column_blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Column ranges with their part of the weight in the type of the computation."""
        for begin in range(0, self.columns, TILE_COLUMNS):
            block = slice(begin, min(begin + TILE_COLUMNS, self.columns))
            yield block, self.weight_VH[block].to(self.scaled_RH.dtype)

    def row_blocks(self) -> Iterator[slice]:
        """Row ranges."""
        for begin in range(0, len(self.scaled_RH), TILE_TOKENS):
            yield slice(begin, min(begin + TILE_TOKENS, len(self.scaled_RH)))

    def buffer(self) -> Tensor:
        """Room for one tile of logits."""
        rows = min(TILE_TOKENS, len(self.scaled_RH))
        return self.scaled_RH.new_empty(rows * min(TILE_COLUMNS, self.columns))

    def logits(self, rows: slice, weight_CH: Tensor, buffer: Tensor) -> Tensor:
        """[rows, columns] logits of one tile, in the buffer."""
        hidden_RH = self.scaled_RH[rows]
        shape = (len(hidden_RH), len(weight_CH))
        tile_RC = buffer[: shape[0] * shape[1]].view(shape)
        torch.mm(hidden_RH, weight_CH.T, out=tile_RC)
        if self.softcap is not None:
            tile_RC.div_(self.softcap).tanh_().mul_(self.softcap * self.cap_scale)
        return tile_RC

    def owned(self, target_R: Tensor, block: slice) -> tuple[Tensor, Tensor]:
        """Rows whose target is a column of the block, and that column within it."""
        local_R = target_R - (self.start + block.start)
        row_M = ((local_R >= 0) & (local_R < block.stop - block.start)).nonzero()[:, 0]
        return row_M, local_R[row_M]


def local_stats(head: Head, target_R: Tensor, with_entropy: bool) -> LocalStats:
    """Statistics over this rank's columns, merged over the tiles as they come."""
    num_rows = len(head.scaled_RH)
    max_R = head.scaled_RH.new_full((num_rows,), LOWEST)
    sum_R, moment_R, target_logit_R = head.scaled_RH.new_zeros(3, num_rows)
    owned_R = torch.zeros_like(target_R, dtype=torch.bool)
    buffer = head.buffer()
    for block, weight_CH in head.column_blocks():
        for rows in head.row_blocks():
            tile_RC = head.logits(rows, weight_CH, buffer)
            row_M, column_M = head.owned(target_R[rows], block)
            target_logit_R[rows][row_M] = tile_RC[row_M, column_M]
            owned_R[rows][row_M] = True
            _add_tile(tile_RC, max_R[rows], sum_R[rows], moment_R[rows], with_entropy)
    return LocalStats(max_R, sum_R, moment_R, target_logit_R, owned_R)


def _add_tile(
    tile_RC: Tensor, max_R: Tensor, sum_R: Tensor, moment_R: Tensor, with_entropy: bool
) -> None:
    """Merges a tile into the running statistics, in place; the tile is overwritten."""
    new_max_R = torch.maximum(max_R, tile_RC.amax(-1))
    shift_R = max_R - new_max_R
    scale_R = shift_R.exp()
    tile_RC.sub_(new_max_R[:, None])
    if with_entropy:
        moment_R.addcmul_(shift_R, sum_R).mul_(scale_R)
        weight_RC = tile_RC.exp()
        moment_R.add_(torch.linalg.vecdot(weight_RC, tile_RC))
    else:
        weight_RC = tile_RC.exp_()
    sum_R.mul_(scale_R).add_(weight_RC.sum(-1))
    max_R.copy_(new_max_R)


@dataclass(frozen=True, eq=False)
class Incoming:
    """What the backward pass knows of each row."""

    target_R: Tensor
    max_R: Tensor
    sum_R: Tensor
    """Sum of exp(z - max) over the vocabulary; kept apart from the maximum, beside which its
    logarithm would lose digits."""
    entropy_R: Tensor | None
    grad_logprob_R: Tensor
    grad_entropy_R: Tensor | None


def gradients(
    head: Head, incoming: Incoming, wants_hidden: bool, wants_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the chosen hidden rows and of the weight, summed in the computing type."""
    grad_RH = torch.zeros_like(head.scaled_RH) if wants_hidden else None
    grad_VH = torch.zeros_like(head.weight_VH) if wants_weight else None
    buffer = head.buffer()
    for block, weight_CH in head.column_blocks():
        block_grad_CH = torch.zeros_like(weight_CH) if grad_VH is not None else None
        for rows in head.row_blocks():
            tile_RC = head.logits(rows, weight_CH, buffer)
            _logit_gradient(tile_RC, head, incoming, rows, block)
            if grad_RH is not None:
                grad_RH[rows].addmm_(tile_RC, weight_CH)
            if block_grad_CH is not None:
                block_grad_CH.addmm_(tile_RC.T, head.scaled_RH[rows])
        if grad_VH is not None:
            grad_VH[block] = block_grad_CH.to(grad_VH.dtype)
    if grad_RH is not None:
        grad_RH = grad_RH.mul_(head.scale).to(head.weight_VH.dtype)
    return grad_RH, grad_VH


def _logit_gradient(
    tile_RC: Tensor, head: Head, incoming: Incoming, rows: slice, block: slice
) -> None:
    """Turns a tile of logits z into the gradient of the uncapped, untempered logits, in place.

    d logprob / dz = [target] - p; d entropy / dz = -p (log p + entropy); the cap adds the factor
    (1 - (z / softcap)^2) / temperature.
    """
    slope_RC = None
    if head.softcap is not None:
        slope_RC = (tile_RC / (head.softcap * head.cap_scale)).square_().neg_().add_(1)
        slope_RC.mul_(head.cap_scale)
    grad_R, sum_R = incoming.grad_logprob_R[rows], incoming.sum_R[rows]
    tile_RC.sub_(incoming.max_R[rows][:, None])
    if incoming.grad_entropy_R is None:
        tile_RC.exp_().mul_(-(grad_R / sum_R)[:, None])
    else:
        unnormalised_RC = tile_RC.exp()
        tile_RC.add_((incoming.entropy_R[rows] - sum_R.log())[:, None])
        tile_RC.mul_(-(incoming.grad_entropy_R[rows] / sum_R)[:, None])
        tile_RC.sub_((grad_R / sum_R)[:, None]).mul_(unnormalised_RC)
    row_M, column_M = head.owned(incoming.target_R[rows], block)
    tile_RC[row_M, column_M] += grad_R[row_M]
    if slope_RC is not None:
        tile_RC.mul_(slope_RC)
