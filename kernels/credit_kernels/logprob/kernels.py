"""Triton programs of linear_logprob.

R rows that are not ignored, C columns of this rank, H hidden. Matrices have adjacent columns; a
stride is the distance of rows. logits = softcap(products) scale. Rows of products and of their
gradients reach in memory to the next multiple of COLUMNS, so that no load or store of them needs a
mask for columns; what lies behind C may be anything.
"""

# A call of a program has no value for Python, but one for Triton.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from credit_kernels.tile_math import (
    LOG2E,
    LOWEST,
    grouped,
    head_tile,
    indexed_dot,
    merge_tile,
    soft_capped,
)


@triton.jit(do_not_specialize=["num_rows"])
def row_stats(
    products_ptr,  # [R, C] fp32
    column_ptr,  # [R] int32: the target's, -1 for none
    max_ptr,  # [R] fp32
    sum_ptr,  # [R] fp32: of exp(z - max)
    moment_ptr,  # [R] fp32: of exp(z - max) (z - max)
    logit_ptr,  # [R] fp32: the target's, 0 for none
    num_rows,
    num_columns,
    stride_r,
    scale,
    softcap,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Softmax statistics of each row, read once."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kept = row < num_rows
    products_row = products_ptr + row.to(tl.int64) * stride_r
    maximum = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    moment = tl.zeros((ROWS,), tl.float32)
    column = tl.arange(0, COLUMNS)
    for start in tl.range(0, num_columns, COLUMNS):
        products = products_row[:, None] + (start + column)[None, :]
        tile = tl.load(products, mask=kept[:, None], other=0.0)
        if CAPPED:
            tile = soft_capped(tile, softcap)
        if start + COLUMNS > num_columns:
            tile = tl.where((start + column < num_columns)[None, :], tile, LOWEST)
        maximum, total, moment = merge_tile(tile, scale, maximum, total, moment)
    target = tl.load(column_ptr + row, mask=kept, other=-1)
    logit = tl.load(products_row + target, mask=kept & (target >= 0), other=0.0)
    if CAPPED:
        logit = soft_capped(logit, softcap)
    tl.store(max_ptr + row, maximum, mask=kept)
    tl.store(sum_ptr + row, total, mask=kept)
    tl.store(moment_ptr + row, moment, mask=kept)
    tl.store(logit_ptr + row, logit * scale, mask=kept)


@triton.jit
def cap_slope(capped, softcap):
    """Slope of the softcap, from its value."""
    bent = capped * (1.0 / softcap)
    return 1.0 - bent * bent


@triton.jit
def capped_gradient(
    tile,  # [R, C] products after the softcap
    maximum,  # [R]
    factor,  # [R]
    slope,  # [R]
    scale,
):
    """[R, C] gradient of the tile, but for the targets' own part; see `Incoming`."""
    shifted = tile * scale - maximum[:, None]
    return tl.exp2(shifted * LOG2E) * (shifted * slope[:, None] + factor[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def row_gradient(
    products_ptr,  # [R, C] fp32
    grad_ptr,  # [R, C]: of the products; may be products_ptr
    column_ptr,  # [R] int32
    max_ptr,  # [R] fp32
    grad_logprob_ptr,  # [R] fp32, times scale as the next two
    factor_ptr,  # [R] fp32
    slope_ptr,  # [R] fp32
    num_rows,
    stride_r,  # of both matrices
    scale,
    softcap,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Gradient of each product, read once and written once."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kept = row < num_rows
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    offset = (row.to(tl.int64) * stride_r)[:, None] + column[None, :]
    tile = tl.load(products_ptr + offset, mask=kept[:, None], other=0.0)
    if CAPPED:
        tile = soft_capped(tile, softcap)
    grad = capped_gradient(
        tile,
        tl.load(max_ptr + row, mask=kept, other=0.0),
        tl.load(factor_ptr + row, mask=kept, other=0.0),
        tl.load(slope_ptr + row, mask=kept, other=0.0),
        scale,
    )
    target = tl.load(column_ptr + row, mask=kept, other=-1)
    grad_logprob = tl.load(grad_logprob_ptr + row, mask=kept, other=0.0)
    grad = tl.where(column[None, :] == target[:, None], grad + grad_logprob[:, None], grad)
    if CAPPED:
        grad *= cap_slope(tile, softcap)
    tl.store(grad_ptr + offset, grad.to(grad_ptr.dtype.element_ty), mask=kept[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def tile_stats(
    hidden,  # [R, H] descriptor or pointer
    weight,  # [C, H] descriptor or pointer
    max_ptr,  # [splits, R] fp32
    sum_ptr,  # [splits, R] fp32
    moment_ptr,  # [splits, R] fp32
    num_rows,
    num_columns,
    H,
    stride_r,
    stride_c,
    scale,
    softcap,
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
    """Softmax statistics of a block of rows over a split of the columns."""
    block, split = grouped(
        tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.cdiv(num_columns, SPLIT), GROUP
    )
    maximum = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    moment = tl.zeros((ROWS,), tl.float32)
    stop = tl.minimum((split + 1) * SPLIT, num_columns)
    for start in tl.range(split * SPLIT, stop, COLUMNS):
        tile = head_tile(
            hidden,
            weight,
            block * ROWS,
            start,
            num_rows,
            num_columns,
            H,
            stride_r,
            stride_c,
            ROWS,
            COLUMNS,
            DEPTH,
            DESCRIPTOR,
            EVEN,
            UPCAST,
        )
        if CAPPED:
            tile = soft_capped(tile, softcap)
        if start + COLUMNS > stop:
            inside = start + tl.arange(0, COLUMNS) < stop
            tile = tl.where(inside[None, :], tile, LOWEST)
        maximum, total, moment = merge_tile(tile, scale, maximum, total, moment)
    row = block * ROWS + tl.arange(0, ROWS)
    offset = split.to(tl.int64) * num_rows + row
    tl.store(max_ptr + offset, maximum, mask=row < num_rows)
    tl.store(sum_ptr + offset, total, mask=row < num_rows)
    tl.store(moment_ptr + offset, moment, mask=row < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def target_logit(
    hidden_ptr,  # [R, H]
    weight_ptr,  # [C, H]
    column_ptr,  # [R] int32
    logit_ptr,  # [R] fp32
    num_rows,
    H,
    stride_r,
    stride_c,
    scale,
    softcap,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Logit of each row's target: a dot product, so that no tile has to look for it."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kept = row < num_rows
    column = tl.load(column_ptr + row, mask=kept, other=-1)
    logit = indexed_dot(
        hidden_ptr, weight_ptr, row, column, num_rows, H, stride_r, stride_c, ROWS, DEPTH
    )
    if CAPPED:
        logit = soft_capped(logit, softcap)
    tl.store(logit_ptr + row, logit * scale, mask=kept)


@triton.jit(do_not_specialize=["num_rows"])
def tile_gradient(
    hidden,  # [R, H] descriptor or pointer
    weight,  # [C, H] descriptor or pointer
    grad_ptr,  # [R, C]: of the products
    column_ptr,  # [R] int32: the target's, counted from the first of these columns
    max_ptr,  # [R] fp32
    grad_logprob_ptr,  # [R] fp32, times scale as the next two
    factor_ptr,  # [R] fp32
    slope_ptr,  # [R] fp32
    num_rows,
    num_columns,
    H,
    stride_r,
    stride_c,
    stride_g,
    scale,
    softcap,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    EVEN: tl.constexpr,
    CAPPED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Gradient of the products in one tile, which is made again."""
    block, column_block = grouped(
        tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.cdiv(num_columns, COLUMNS), GROUP
    )
    tile = head_tile(
        hidden,
        weight,
        block * ROWS,
        column_block * COLUMNS,
        num_rows,
        num_columns,
        H,
        stride_r,
        stride_c,
        ROWS,
        COLUMNS,
        DEPTH,
        DESCRIPTOR,
        EVEN,
        UPCAST,
    )
    if CAPPED:
        tile = soft_capped(tile, softcap)
    row = block * ROWS + tl.arange(0, ROWS)
    kept = row < num_rows
    grad = capped_gradient(
        tile,
        tl.load(max_ptr + row, mask=kept, other=0.0),
        tl.load(factor_ptr + row, mask=kept, other=0.0),
        tl.load(slope_ptr + row, mask=kept, other=0.0),
        scale,
    )
    column = column_block * COLUMNS + tl.arange(0, COLUMNS)
    target = tl.load(column_ptr + row, mask=kept, other=-1)
    # To look for targets costs as much as all the rest; few tiles have one.
    if tl.max((target // COLUMNS == column_block).to(tl.int32), 0) > 0:
        grad_logprob = tl.load(grad_logprob_ptr + row, mask=kept, other=0.0)
        grad = tl.where(column[None, :] == target[:, None], grad + grad_logprob[:, None], grad)
    if CAPPED:
        grad *= cap_slope(tile, softcap)
    offset = (row.to(tl.int64) * stride_g)[:, None] + column[None, :]
    tl.store(grad_ptr + offset, grad.to(grad_ptr.dtype.element_ty), mask=kept[:, None])
