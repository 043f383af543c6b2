"""The products of all contexts with one tile of the weight: device code.

A block of rows in every context and a tile of the weight meet on the chip, where the products stay:
the weight is read once for all contexts.
"""

# Triton knows no starred tuples, and a launch signature is a table.
# ruff: noqa: RUF005, PLR0913

import triton
import triton.language as tl


@triton.jit
def products_of(
    hidden,  # [C, R, H]: descriptor of [C R, H], or pointer
    weight,  # [V, H]: descriptor or pointer
    first_row,
    first_column,
    num_rows,
    num_columns,
    H,
    stride_r,
    stride_v,
    CONTEXTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    EVEN: tl.constexpr,  # DEPTH divides H
    UPCAST: tl.constexpr,  # the interpreter's product of bfloat16 is wrong
):
    """A tile of products for every context; see `tile_math.head_tile`."""
    tiles = ()
    for _ in tl.static_range(CONTEXTS):
        tiles = tiles + (tl.zeros((ROWS, COLUMNS), tl.float32),)
    depth = tl.arange(0, DEPTH)
    # Clamped instead of masked: the loop over H then has no mask.
    row = tl.minimum(first_row + tl.arange(0, ROWS), num_rows - 1).to(tl.int64)
    column = tl.minimum(first_column + tl.arange(0, COLUMNS), num_columns - 1).to(tl.int64)
    for start in tl.range(0, H, DEPTH):
        kept = (start + depth < H)[None, :]
        if DESCRIPTOR:
            b = weight.load([first_column, start])
        else:
            weight_ptr = weight + column[:, None] * stride_v + depth[None, :] + start
            b = tl.load(weight_ptr) if EVEN else tl.load(weight_ptr, mask=kept, other=0.0)
        if UPCAST:
            b = b.to(tl.float32)
        added = ()
        for context in tl.static_range(CONTEXTS):
            if DESCRIPTOR:
                a = hidden.load([context * num_rows + first_row, start])
            else:
                context_row = context * num_rows.to(tl.int64) + row
                hidden_ptr = hidden + context_row[:, None] * stride_r + depth[None, :] + start
                a = tl.load(hidden_ptr) if EVEN else tl.load(hidden_ptr, mask=kept, other=0.0)
            if UPCAST:
                a = a.to(tl.float32)
            added = added + (tl.dot(a, b.T, tiles[context], input_precision="ieee"),)
        tiles = added
    return tiles
