"""The `rows` backend: a chunk of logits by one matrix product, and a kernel that reads each row.

The products are the vendor's; a chunk of float32 logits lives in memory between the two, and in the
backward pass, or at once where the weight is frozen, becomes its own gradient there.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from credit_kernels.dispatch import chunk_bytes
from credit_kernels.logprob import kernels
from credit_kernels.logprob.function import Backend, Incoming
from credit_kernels.logprob.operands import Operands, blocks
from credit_kernels.logprob.tables import ROW_SIZES
from credit_kernels.products import add_product, product, write_product
from credit_kernels.targets import target_of
from credit_kernels.vocab_parallel import LocalStats


def local_stats(head: Operands, target_R: Tensor, with_entropy: bool) -> LocalStats:
    """Statistics over this rank's columns; those of the entropy come for free."""
    column_R = head.target_column(target_R)
    stats = head.empty_stats(column_R)
    for rows, product_KC in products(head):
        write_stats(stats[rows], head, column_R[rows], product_KC)
    return stats


def stats_and_unit(
    head: Operands, target_R: Tensor, with_entropy: bool
) -> tuple[LocalStats, Tensor]:
    """The same and d logprob / d hidden, [R, H] float32, from one chunk of products."""
    column_R = head.target_column(target_R)
    stats = head.empty_stats(column_R)
    unit_RH = head.hidden_RH.new_zeros(head.hidden_RH.shape, dtype=torch.float32)
    for rows, product_KC in products(head):
        part, column_K = stats[rows], column_R[rows]
        write_stats(part, head, column_K, product_KC)
        one_K = torch.ones_like(part.max_T)
        incoming = Incoming(
            target_R=target_R[rows],
            max_R=part.max_T,
            grad_logprob_R=one_K,
            factor_R=-one_K / part.sum_T,
            slope_R=None,
        )
        row_numbers = (column_K, part.max_T, *head.row_gradients(incoming))
        grad_KC = product_gradient(head, product_KC, row_numbers)
        write_product(unit_RH[rows], grad_KC, head.weight_CH.T)
    return stats, unit_RH


def write_stats(out: LocalStats, head: Operands, column_K: Tensor, product_KC: Tensor) -> None:
    """Statistics of a chunk, whose targets are in these columns."""
    size = ROW_SIZES[target_of(column_K.device)]
    kernels.row_stats[(blocks(len(product_KC), size.rows),)](
        product_KC,
        column_K,
        out.max_T,
        out.sum_T,
        out.moment_T,
        out.target_T,
        *product_KC.shape,
        product_KC.stride(0),
        head.scale,
        head.cap,
        ROWS=size.rows,
        COLUMNS=size.columns,
        CAPPED=head.softcap is not None,
        num_warps=size.warps,
    )


def gradients(
    head: Operands, incoming: Incoming, wants_hidden: bool, wants_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the rows and of the weight, added up in float32."""
    grad_RH = head.hidden_RH.new_zeros(head.hidden_RH.shape) if wants_hidden else None
    grad_VH = torch.zeros_like(head.weight_VH, dtype=torch.float32) if wants_weight else None
    column_R = head.target_column(incoming.target_R)
    row_numbers = (column_R, incoming.max_R, *head.row_gradients(incoming))
    for rows, product_KC in products(head):
        grad_KC = product_gradient(head, product_KC, tuple(x[rows] for x in row_numbers))
        if grad_RH is not None:
            grad_RH[rows] = product(grad_KC, head.weight_CH.T)
        if grad_VH is not None:
            add_product(grad_VH[: head.num_columns], grad_KC.T, head.hidden_RH[rows].T)
    return grad_RH, None if grad_VH is None else grad_VH.to(head.weight_VH.dtype)


def products(head: Operands) -> Iterator[tuple[slice, Tensor]]:
    """Chunks of rows with their float32 products, each in the memory of the one before."""
    if head.is_empty:
        return
    num_rows, num_columns = len(head.hidden_RH), head.num_columns
    columns = ROW_SIZES[target_of(head.hidden_RH.device)].columns
    stride = blocks(num_columns, columns) * columns
    row_bytes = stride * (4 + head.gradient_dtype.itemsize)
    chunk = max(chunk_bytes(head.hidden_RH.device) // row_bytes // 128 * 128, 128)
    buffer_KC = head.hidden_RH.new_empty(min(chunk, num_rows), stride, dtype=torch.float32)
    for first in range(0, num_rows, chunk):
        rows = slice(first, min(first + chunk, num_rows))
        product_KC = buffer_KC[: rows.stop - first, :num_columns]
        write_product(product_KC, head.hidden_RH[rows], head.weight_CH)
        yield rows, product_KC


def product_gradient(head: Operands, product_KC: Tensor, row_numbers: tuple[Tensor, ...]) -> Tensor:
    """Gradient of the products: in their place, or beside them in the tensor cores' type."""
    num_rows, num_columns = product_KC.shape
    size = ROW_SIZES[target_of(product_KC.device)]
    grad_KC = product_KC
    if head.gradient_dtype != product_KC.dtype:
        buffer_KC = product_KC.new_empty(num_rows, product_KC.stride(0), dtype=head.gradient_dtype)
        grad_KC = buffer_KC[:, :num_columns]
    grid = (blocks(num_rows, size.rows), blocks(num_columns, size.columns))
    kernels.row_gradient[grid](
        product_KC,
        grad_KC,
        *row_numbers,
        num_rows,
        product_KC.stride(0),
        head.scale,
        head.cap,
        ROWS=size.rows,
        COLUMNS=size.columns,
        CAPPED=head.softcap is not None,
        num_warps=size.warps,
    )
    return grad_KC


BACKEND = Backend(Operands.of, local_stats, gradients, stats_and_unit)
