"""Triton programs of the `tiles` backend: the products of all contexts with one tile of the weight.

R rows, V columns of this rank, C contexts, H hidden. Each makes its products anew; see
`tile_products`.
"""

# Triton knows no starred tuples, and a launch signature is a table.
# ruff: noqa: RUF005, PLR0913

import triton
import triton.language as tl

from credit_kernels.evidence.row_kernels import store_sums
from credit_kernels.evidence.tile_logits import (
    capped_slope,
    logit_gradient,
    logits_of,
    masked,
    sum_of_logs,
)
from credit_kernels.evidence.tile_products import products_of
from credit_kernels.evidence.tile_sums import add_tile, no_sums
from credit_kernels.tile_math import LOWEST, grouped, merge_tile


@triton.jit(do_not_specialize=["num_rows", "first_row", "stop_row"])
def tile_softmax(
    hidden,  # [C, R, H] descriptor or pointer
    weight,  # [V, H] descriptor or pointer
    sums_ptr,  # [3 C, splits, stop_row - first_row] fp32: maximum, sum and moment of each context
    num_rows,
    num_columns,
    H,
    stride_r,
    stride_v,
    first_row,
    stop_row,
    scale,
    softcap,
    PLAN: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    EVEN: tl.constexpr,
    CAPPED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Softmax statistics of every context, of a block of rows over a split of the columns."""
    here = stop_row - first_row
    num_splits = tl.cdiv(num_columns, SPLIT)
    block, split = grouped(tl.program_id(0), tl.cdiv(here, ROWS), num_splits, GROUP)
    stop = tl.minimum((split + 1) * SPLIT, num_columns)
    row = block * ROWS + tl.arange(0, ROWS)
    kept_row = row < here
    CONTEXTS: tl.constexpr = PLAN.contexts
    states = ()
    for _ in tl.static_range(CONTEXTS):
        zero = tl.zeros((ROWS,), tl.float32)
        states = states + ((tl.full((ROWS,), LOWEST, tl.float32), zero, zero),)
    for start in tl.range(split * SPLIT, stop, COLUMNS):
        products = products_of(
            hidden,
            weight,
            first_row + block * ROWS,
            start,
            num_rows,
            num_columns,
            H,
            stride_r,
            stride_v,
            PLAN.contexts,
            ROWS,
            COLUMNS,
            DEPTH,
            DESCRIPTOR,
            EVEN,
            UPCAST,
        )
        tiles = logits_of(products, scale, softcap, PLAN, CAPPED)
        if start + COLUMNS > stop:
            tiles = masked(tiles, start + tl.arange(0, COLUMNS) < stop, PLAN)
        merged = ()
        for context in tl.static_range(CONTEXTS):
            maximum, total, moment = states[context]
            merged = merged + (merge_tile(tiles[context], 1.0, maximum, total, moment),)
        states = merged
    offset = split.to(tl.int64) * here + row
    stride = num_splits.to(tl.int64) * here
    for context in tl.static_range(CONTEXTS):
        for i in tl.static_range(3):
            place = sums_ptr + (3 * context + i) * stride + offset
            tl.store(place, states[context][i], mask=kept_row)


@triton.jit(do_not_specialize=["num_rows", "first_row", "stop_row"])
def tile_sums(
    hidden,  # [C, R, H] descriptor or pointer
    weight,  # [V, H] descriptor or pointer
    numbers_ptr,  # [numbers, R] fp32, see tile_logits
    sums_ptr,  # [sums, splits, stop_row - first_row] fp32, see tile_sums.Sums
    num_rows,
    num_columns,
    H,
    stride_r,
    stride_v,
    first_row,
    stop_row,
    scale,
    softcap,
    PLAN: tl.constexpr,
    SPLIT: tl.constexpr,  # columns of a split
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    EVEN: tl.constexpr,
    CAPPED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """All sums of a block of rows over a split of the columns."""
    here = stop_row - first_row
    num_splits = tl.cdiv(num_columns, SPLIT)
    block, split = grouped(tl.program_id(0), tl.cdiv(here, ROWS), num_splits, GROUP)
    stop = tl.minimum((split + 1) * SPLIT, num_columns)
    row = block * ROWS + tl.arange(0, ROWS)
    kept_row = row < here
    sums = no_sums(PLAN, ROWS)
    for start in tl.range(split * SPLIT, stop, COLUMNS):
        products = products_of(
            hidden,
            weight,
            first_row + block * ROWS,
            start,
            num_rows,
            num_columns,
            H,
            stride_r,
            stride_v,
            PLAN.contexts,
            ROWS,
            COLUMNS,
            DEPTH,
            DESCRIPTOR,
            EVEN,
            UPCAST,
        )
        tiles = logits_of(products, scale, softcap, PLAN, CAPPED)
        if start + COLUMNS > stop:
            tiles = masked(tiles, start + tl.arange(0, COLUMNS) < stop, PLAN)
        here_row = first_row + row
        sums = add_tile(sums, tiles, True, numbers_ptr, num_rows, here_row, kept_row, PLAN)
    offset = split.to(tl.int64) * here + row
    store_sums(sums_ptr, sums, num_splits.to(tl.int64) * here, offset, kept_row)


@triton.jit(do_not_specialize=["num_rows", "first_row", "stop_row"])
def tile_tilted(
    hidden,  # [C, R, H] descriptor or pointer
    weight,  # [V, H] descriptor or pointer
    numbers_ptr,  # [numbers, R] fp32, see tile_logits
    sums_ptr,  # [2, splits, stop_row - first_row] fp32: maximum, and sum of exp(u - maximum)
    num_rows,
    num_columns,
    H,
    stride_r,
    stride_v,
    first_row,
    stop_row,
    scale,
    softcap,
    PLAN: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    EVEN: tl.constexpr,
    CAPPED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Softmax of u = sum of coefficient times log-prob, of a block of rows over a split."""
    here = stop_row - first_row
    num_splits = tl.cdiv(num_columns, SPLIT)
    block, split = grouped(tl.program_id(0), tl.cdiv(here, ROWS), num_splits, GROUP)
    stop = tl.minimum((split + 1) * SPLIT, num_columns)
    row = block * ROWS + tl.arange(0, ROWS)
    kept_row = row < here
    maximum = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for start in tl.range(split * SPLIT, stop, COLUMNS):
        products = products_of(
            hidden,
            weight,
            first_row + block * ROWS,
            start,
            num_rows,
            num_columns,
            H,
            stride_r,
            stride_v,
            PLAN.contexts,
            ROWS,
            COLUMNS,
            DEPTH,
            DESCRIPTOR,
            EVEN,
            UPCAST,
        )
        tiles = logits_of(products, scale, softcap, PLAN, CAPPED)
        tilted = sum_of_logs(tiles, numbers_ptr, num_rows, first_row + row, kept_row, PLAN)
        if start + COLUMNS > stop:
            inside = start + tl.arange(0, COLUMNS) < stop
            tilted = tl.where(inside[None, :], tilted, LOWEST)
        maximum, total, _ = merge_tile(tilted, 1.0, maximum, total, tl.zeros_like(total))
    offset = split.to(tl.int64) * here + row
    tl.store(sums_ptr + offset, maximum, mask=kept_row)
    tl.store(sums_ptr + num_splits.to(tl.int64) * here + offset, total, mask=kept_row)


@triton.jit(do_not_specialize=["num_rows"])
def tile_gradient(
    hidden,  # [C, R, H] descriptor or pointer
    weight,  # [V, H] descriptor or pointer
    grad_ptr,  # [R, V]: of the student's products
    numbers_ptr,  # [numbers, R] fp32
    num_rows,
    num_columns,
    H,
    stride_r,
    stride_v,
    stride_g,
    scale,
    softcap,
    PLAN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    EVEN: tl.constexpr,
    CAPPED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Gradient of the student's products in one tile, which is made again for all contexts."""
    block, column_block = grouped(
        tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.cdiv(num_columns, COLUMNS), GROUP
    )
    products = products_of(
        hidden,
        weight,
        block * ROWS,
        column_block * COLUMNS,
        num_rows,
        num_columns,
        H,
        stride_r,
        stride_v,
        PLAN.contexts,
        ROWS,
        COLUMNS,
        DEPTH,
        DESCRIPTOR,
        EVEN,
        UPCAST,
    )
    tiles = logits_of(products, scale, softcap, PLAN, CAPPED)
    row = block * ROWS + tl.arange(0, ROWS)
    kept_row = row < num_rows
    grad = logit_gradient(tiles, True, numbers_ptr, num_rows, row, kept_row, PLAN)
    if CAPPED:
        grad *= capped_slope(products[0], softcap)
    column = column_block * COLUMNS + tl.arange(0, COLUMNS)
    offset = (row.to(tl.int64) * stride_g)[:, None] + column[None, :]
    tl.store(grad_ptr + offset, grad.to(grad_ptr.dtype.element_ty), mask=kept_row[:, None])
