"""The `tiles` backend: no logit leaves the chip in the forward pass.

Every program makes statistics of some rows over a split of the columns, and the splits are merged
in order: no lock, no atomic sum. The backward pass makes the gradient of the products, a slice of
the columns at a time, and leaves the two products with it to the vendor's library.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from credit_kernels.dispatch import chunk_bytes
from credit_kernels.logprob import kernels
from credit_kernels.logprob.function import Backend, Incoming
from credit_kernels.logprob.operands import Operands, blocks
from credit_kernels.logprob.tables import (
    GRADIENT_SIZES,
    GROUP,
    SPLIT_COLUMNS,
    STATS_SIZES,
    TARGET_SIZES,
    TileSize,
    tile_size,
)
from credit_kernels.products import add_product, product
from credit_kernels.targets import INTERPRETER, target_of
from credit_kernels.vocab_parallel import LocalStats

SLICE_STEP = 512
"""Columns of a slice are a multiple of this, and this of a tile's, whose stores have no mask."""


def local_stats(head: Operands, target_R: Tensor, with_entropy: bool) -> LocalStats:
    """Statistics over this rank's columns; those of the entropy come for free."""
    column_R = head.target_column(target_R)
    stats = head.empty_stats(column_R)
    if head.is_empty:
        return stats
    hidden_RH, weight_CH = dense(head.hidden_RH), dense(head.weight_CH)
    write_target_logits(stats.target_T, head, hidden_RH, weight_CH, column_R)
    splits = split_stats(head, hidden_RH, weight_CH)
    max_R = splits.max_T.amax(0)
    sum_R, moment_R, _ = splits.relative_to(max_R).sum(1)
    return LocalStats(max_R, sum_R, moment_R, stats.target_T, stats.owned_T)


def gradients(
    head: Operands, incoming: Incoming, wants_hidden: bool, wants_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the rows and of the weight, added up in float32."""
    grad_RH = torch.zeros_like(head.hidden_RH, dtype=torch.float32) if wants_hidden else None
    grad_VH = torch.zeros_like(head.weight_VH) if wants_weight else None
    if not head.is_empty:
        hidden_RH, weight_CH = dense(head.hidden_RH), dense(head.weight_CH)
        column_R = head.target_column(incoming.target_R)
        row_numbers = (incoming.max_R, *head.row_gradients(incoming))
        width = slice_columns(head)
        buffer_RS = hidden_RH.new_empty(len(hidden_RH), width, dtype=head.gradient_dtype)
        for first in range(0, head.num_columns, width):
            weight_SH = weight_CH[first : first + width]
            grad_RS = buffer_RS[:, : len(weight_SH)]
            # Targets in other slices become columns that no tile of this one has.
            numbers = (column_R - first, *row_numbers)
            write_product_gradient(grad_RS, head, hidden_RH, weight_SH, numbers)
            if grad_RH is not None:
                add_product(grad_RH, grad_RS, weight_SH.T)
            if grad_VH is not None:
                grad_VH[first : first + len(weight_SH)] = product(grad_RS.T, hidden_RH.T)
    return None if grad_RH is None else grad_RH.to(head.hidden_RH.dtype), grad_VH


def slice_columns(head: Operands) -> int:
    """Columns whose gradients fit in a chunk's memory."""
    row_bytes = len(head.hidden_RH) * head.gradient_dtype.itemsize
    steps = chunk_bytes(head.hidden_RH.device) // (row_bytes * SLICE_STEP)
    return SLICE_STEP * min(max(steps, 1), blocks(head.num_columns, SLICE_STEP))


def dense(matrix: Tensor) -> Tensor:
    """With adjacent columns and rows apart, as the kernels and descriptors want them."""
    is_dense = matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1]
    return matrix if is_dense else matrix.contiguous()


@dataclass(frozen=True, eq=False)
class Launch:
    """Arguments common to the programs that make tiles of hidden_RH @ weight_CH.T."""

    sources: tuple[Any, Any]
    """hidden and weight, as descriptors or as tensors."""
    extents: tuple[int, ...]
    """Rows, columns, H and the strides of both."""
    constants: dict[str, int | bool]

    @classmethod
    def of(cls, hidden_RH: Tensor, weight_CH: Tensor, size: TileSize, capped: bool) -> "Launch":
        descriptor = size.descriptor and all(map(_can_be_described, (hidden_RH, weight_CH)))
        sources: tuple[Any, Any] = (hidden_RH, weight_CH)
        if descriptor:
            # Made on the host: an allocator for those that kernels make is a thread's own.
            from triton.tools.tensor_descriptor import TensorDescriptor

            sources = (
                TensorDescriptor.from_tensor(hidden_RH, [size.rows, size.depth]),
                TensorDescriptor.from_tensor(weight_CH, [size.columns, size.depth]),
            )
        return cls(
            sources=sources,
            extents=(len(hidden_RH), *weight_CH.shape, hidden_RH.stride(0), weight_CH.stride(0)),
            constants={
                "ROWS": size.rows,
                "COLUMNS": size.columns,
                "DEPTH": size.depth,
                "GROUP": GROUP,
                "DESCRIPTOR": descriptor,
                "EVEN": hidden_RH.shape[1] % size.depth == 0,
                "CAPPED": capped,
                "UPCAST": target_of(hidden_RH.device) == INTERPRETER,
                "num_warps": size.warps,
                "num_stages": size.stages,
            },
        )


def _can_be_described(matrix: Tensor) -> bool:
    """Rows start at multiples of 16 bytes, which the tensor memory accelerator needs."""
    row_bytes = matrix.stride(0) * matrix.element_size()
    return matrix.data_ptr() % 16 == 0 and row_bytes % 16 == 0 and matrix.shape[1] > 0


def split_stats(head: Operands, hidden_RH: Tensor, weight_CH: Tensor) -> LocalStats:
    """[splits, R] statistics over each split of the columns, without the target."""
    num_splits = blocks(head.num_columns, SPLIT_COLUMNS)
    size = tile_size(STATS_SIZES, target_of(hidden_RH.device), hidden_RH.element_size())
    launch = Launch.of(hidden_RH, weight_CH, size, head.softcap is not None)
    max_SR, sum_SR, moment_SR = (
        hidden_RH.new_empty(num_splits, len(hidden_RH), dtype=torch.float32) for _ in range(3)
    )
    kernels.tile_stats[(blocks(len(hidden_RH), size.rows) * num_splits,)](
        *launch.sources,
        max_SR,
        sum_SR,
        moment_SR,
        *launch.extents,
        head.scale,
        head.cap,
        SPLIT=SPLIT_COLUMNS,
        **launch.constants,
    )
    nowhere_SR = torch.zeros_like(max_SR, dtype=torch.bool)
    return LocalStats(max_SR, sum_SR, moment_SR, max_SR, nowhere_SR)


def write_target_logits(
    logit_R: Tensor, head: Operands, hidden_RH: Tensor, weight_CH: Tensor, column_R: Tensor
) -> None:
    """Logits of the targets that are among this rank's columns, 0 for the others."""
    size = TARGET_SIZES[target_of(hidden_RH.device)]
    kernels.target_logit[(blocks(len(hidden_RH), size.rows),)](
        hidden_RH,
        weight_CH,
        column_R,
        logit_R,
        len(hidden_RH),
        hidden_RH.shape[1],
        hidden_RH.stride(0),
        weight_CH.stride(0),
        head.scale,
        head.cap,
        ROWS=size.rows,
        DEPTH=size.columns,
        CAPPED=head.softcap is not None,
        num_warps=size.warps,
    )


def write_product_gradient(
    grad_RS: Tensor,
    head: Operands,
    hidden_RH: Tensor,
    weight_SH: Tensor,
    row_numbers: tuple[Tensor, ...],
) -> None:
    """Gradient of hidden @ weight.T in a slice of the columns."""
    size = tile_size(GRADIENT_SIZES, target_of(hidden_RH.device), hidden_RH.element_size())
    launch = Launch.of(hidden_RH, weight_SH, size, head.softcap is not None)
    num_tiles = blocks(len(hidden_RH), size.rows) * blocks(len(weight_SH), size.columns)
    kernels.tile_gradient[(num_tiles,)](
        *launch.sources,
        grad_RS,
        *row_numbers,
        *launch.extents,
        grad_RS.stride(0),
        head.scale,
        head.cap,
        **launch.constants,
    )


BACKEND = Backend(Operands.of, local_stats, gradients)
