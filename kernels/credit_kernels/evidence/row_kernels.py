"""Triton programs of the `rows` backend: each reads the products of all contexts of a row once.

R rows, V columns of this rank, C contexts. Rows of products reach in memory to the next multiple
of COLUMNS, as in `logprob.kernels`; what lies behind V may be anything.
"""

# Triton knows no starred tuples, and a launch signature is a table.
# ruff: noqa: RUF005, PLR0913

import triton
import triton.language as tl

from credit_kernels.evidence.tile_logits import (
    capped_slope,
    logit_gradient,
    logits_of,
    masked,
    mean_of_negatives,
    sum_of_logs,
    support,
)
from credit_kernels.evidence.tile_sums import add_tile, no_sums
from credit_kernels.tile_math import LOWEST, merge_tile


@triton.jit
def tiles_at(
    products_row,  # [ROWS] pointers to the student's rows
    column,
    target,
    numbers_ptr,
    stride_c,
    stride_n,
    row,
    kept_row,
    scale,
    softcap,
    PLAN: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Products of every context, logits of every slot and the support in some columns."""
    CONTEXTS: tl.constexpr = PLAN.contexts
    products = ()
    for context in tl.static_range(CONTEXTS):
        pointer = products_row[:, None] + context * stride_c.to(tl.int64) + column[None, :]
        products = products + (tl.load(pointer, mask=kept_row[:, None], other=0.0),)
    tiles = logits_of(products, scale, softcap, PLAN, CAPPED)
    if PLAN.slots > PLAN.contexts:
        mean = mean_of_negatives(tiles, numbers_ptr, stride_n, row, kept_row, PLAN)
        tiles = tiles + (mean,)
    kept = kept_row[:, None]
    if PLAN.support:
        kept = support(products, column, target, numbers_ptr, stride_n, row, kept_row, PLAN)
    return products, tiles, kept


@triton.jit(do_not_specialize=["num_rows"])
def row_sums(
    products_ptr,  # [C, R, V] fp32
    column_ptr,  # [R] int32: the target's, -1 for none
    numbers_ptr,  # [numbers, R] fp32, see tile_logits
    sums_ptr,  # [sums, R] fp32, see tile_sums.Sums
    num_rows,
    num_columns,
    stride_c,
    stride_r,
    stride_n,  # of all arrays [.., R]
    scale,
    softcap,
    PLAN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """All sums of each row, tile by tile."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kept_row = row < num_rows
    products_row = products_ptr + row.to(tl.int64) * stride_r
    target = tl.load(column_ptr + row, mask=kept_row, other=-1)
    sums = no_sums(PLAN, ROWS)
    for start in tl.range(0, num_columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        _, tiles, kept = tiles_at(
            products_row,
            column,
            target,
            numbers_ptr,
            stride_c,
            stride_n,
            row,
            kept_row,
            scale,
            softcap,
            PLAN,
            CAPPED,
        )
        if start + COLUMNS > num_columns:
            tiles = masked(tiles, column < num_columns, PLAN)
        sums = add_tile(sums, tiles, kept, numbers_ptr, stride_n, row, kept_row, PLAN)
    store_sums(sums_ptr, sums, stride_n, row, kept_row)


@triton.jit
def store_sums(sums_ptr, sums, stride_n, offset, kept_row):
    """One array after the other."""
    flat = sums.kl + sums.weight + sums.mean + sums.square
    flat = flat + sums.mass + sums.cross + sums.reference + sums.centre
    for i in tl.static_range(len(flat)):
        tl.store(sums_ptr + i * stride_n + offset, flat[i], mask=kept_row)


@triton.jit(do_not_specialize=["num_rows"])
def row_tilted(
    products_ptr,  # [C, R, V] fp32
    column_ptr,  # [R] int32
    numbers_ptr,  # [numbers, R] fp32
    sums_ptr,  # [2, R] fp32: maximum, and sum of exp(u - maximum)
    num_rows,
    num_columns,
    stride_c,
    stride_r,
    stride_n,
    scale,
    softcap,
    PLAN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Softmax over the support of u = sum of coefficient times log-prob."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kept_row = row < num_rows
    products_row = products_ptr + row.to(tl.int64) * stride_r
    target = tl.load(column_ptr + row, mask=kept_row, other=-1)
    maximum = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for start in tl.range(0, num_columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        _, tiles, kept = tiles_at(
            products_row,
            column,
            target,
            numbers_ptr,
            stride_c,
            stride_n,
            row,
            kept_row,
            scale,
            softcap,
            PLAN,
            CAPPED,
        )
        tilted = sum_of_logs(tiles, numbers_ptr, stride_n, row, kept_row, PLAN)
        kept = kept & (column < num_columns)[None, :]
        tilted = tl.where(kept, tilted, LOWEST)
        maximum, total, _ = merge_tile(tilted, 1.0, maximum, total, tl.zeros_like(total))
    tl.store(sums_ptr + row, maximum, mask=kept_row)
    tl.store(sums_ptr + stride_n + row, total, mask=kept_row)


@triton.jit(do_not_specialize=["num_rows"])
def row_gradient(
    products_ptr,  # [C, R, V] fp32
    grad_ptr,  # [R, V]: of the student's products; may be products_ptr
    column_ptr,  # [R] int32
    numbers_ptr,  # [numbers, R] fp32
    num_rows,
    stride_c,
    stride_r,  # of both matrices
    stride_n,
    scale,
    softcap,
    PLAN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Gradient of each product of the student, read once and written once."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kept_row = row < num_rows
    products_row = products_ptr + row.to(tl.int64) * stride_r
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    products, tiles, kept = tiles_at(
        products_row,
        column,
        tl.load(column_ptr + row, mask=kept_row, other=-1),
        numbers_ptr,
        stride_c,
        stride_n,
        row,
        kept_row,
        scale,
        softcap,
        PLAN,
        CAPPED,
    )
    grad = logit_gradient(tiles, kept, numbers_ptr, stride_n, row, kept_row, PLAN)
    if CAPPED:
        grad *= capped_slope(products[0], softcap)
    offset = (row.to(tl.int64) * stride_r)[:, None] + column[None, :]
    tl.store(grad_ptr + offset, grad.to(grad_ptr.dtype.element_ty), mask=kept_row[:, None])
