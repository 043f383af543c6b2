"""Device functions that the Triton kernels of all operations share.

A tile holds float32 [rows, columns] products of the output head. libdevice and inline assembly are
left alone: the interpreter has neither.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)


@triton.jit
def head_tile(  # noqa: PLR0913
    hidden,  # descriptor or pointer [R, H]
    weight,  # descriptor or pointer [C, H]
    first_row,
    first_column,
    num_rows,
    num_columns,
    H,
    stride_r,
    stride_c,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    DESCRIPTOR: tl.constexpr,  # how hidden and weight are given
    EVEN: tl.constexpr,  # DEPTH divides H
    UPCAST: tl.constexpr,  # the interpreter's product of bfloat16 is wrong
):
    """[ROWS, COLUMNS] hidden @ weight.T, summed in float32.

    Rows and columns behind the last hold anything; they are not read from memory.
    """
    tile = tl.zeros((ROWS, COLUMNS), tl.float32)
    depth = tl.arange(0, DEPTH)
    if not DESCRIPTOR:
        # Clamped instead of masked: the loop over H then has no mask.
        row = tl.minimum(first_row + tl.arange(0, ROWS), num_rows - 1).to(tl.int64)
        column = tl.minimum(first_column + tl.arange(0, COLUMNS), num_columns - 1).to(tl.int64)
        hidden_ptr = hidden + row[:, None] * stride_r + depth[None, :]
        weight_ptr = weight + column[:, None] * stride_c + depth[None, :]
    for start in tl.range(0, H, DEPTH):
        if DESCRIPTOR:
            a = hidden.load([first_row, start])
            b = weight.load([first_column, start])
        elif EVEN:
            a = tl.load(hidden_ptr + start)
            b = tl.load(weight_ptr + start)
        else:
            kept = (start + depth < H)[None, :]
            a = tl.load(hidden_ptr + start, mask=kept, other=0.0)
            b = tl.load(weight_ptr + start, mask=kept, other=0.0)
        if UPCAST:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        # "ieee" matters for float32 alone: no rounding to TF32.
        tile = tl.dot(a, b.T, tile, input_precision="ieee")
    return tile


@triton.jit
def indexed_dot(  # noqa: PLR0913
    hidden_ptr,  # [R, H]
    weight_ptr,  # [C, H]
    row,
    column,  # of each row; -1 for none
    num_rows,
    H,
    stride_r,
    stride_c,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """[ROWS] hidden[row] . weight[column] in float32; 0 where there is none."""
    kept = (row < num_rows) & (column >= 0)
    depth = tl.arange(0, DEPTH)
    hidden_row = hidden_ptr + row.to(tl.int64)[:, None] * stride_r + depth[None, :]
    weight_row = weight_ptr + column.to(tl.int64)[:, None] * stride_c + depth[None, :]
    total = tl.zeros((ROWS, DEPTH), tl.float32)
    for start in tl.range(0, H, DEPTH):
        mask = kept[:, None] & (start + depth < H)[None, :]
        a = tl.load(hidden_row + start, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(weight_row + start, mask=mask, other=0.0).to(tl.float32)
        total += a * b
    return tl.sum(total, 1)


@triton.jit
def soft_capped(product, softcap):
    """softcap tanh(product / softcap), without libdevice's tanh."""
    power = tl.exp2(product * (-2.0 * LOG2E / softcap))
    return 2.0 * softcap / (1.0 + power) - softcap


@triton.jit
def merge_tile(tile, scale, maximum, total, moment):
    """Running softmax statistics of each row, with the logits `scale` tile merged in.

    total is the sum of exp(z - maximum), moment that of exp(z - maximum) (z - maximum). The maximum
    is taken before it is scaled, so that the compiler can fuse the scale into the difference.
    """
    new = tl.maximum(maximum, tl.max(tile, 1) * scale)
    shift = maximum - new
    shrink = tl.exp2(shift * LOG2E)
    shifted = tile * scale - new[:, None]
    power = tl.exp2(shifted * LOG2E)
    moment = (moment + shift * total) * shrink + tl.sum(power * shifted, 1)
    total = total * shrink + tl.sum(power, 1)
    return new, total, moment


@triton.jit
def grouped(program, num_row_blocks, num_column_blocks, GROUP: tl.constexpr):
    """(row block, column block) of a program: GROUP row blocks go over the columns together.

    They read the same rows of the weight at about the same time, so that the cache serves all.
    """
    per_group = GROUP * num_column_blocks
    first = program // per_group * GROUP
    size = tl.minimum(num_row_blocks - first, GROUP)
    within = program % per_group
    return first + within % size, within // size
