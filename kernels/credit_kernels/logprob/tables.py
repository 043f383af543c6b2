"""Tile sizes by target: fixed, so that nothing is tuned, or compiled, again for another T.

`python kernels/quality` compiles these very sizes and reads registers and spills from the binary.
"""

from dataclasses import dataclass

from credit_kernels.targets import INTERPRETER


@dataclass(frozen=True, kw_only=True)
class RowSize:
    """What one program of a row kernel works on at a time."""

    rows: int
    columns: int
    warps: int


@dataclass(frozen=True, kw_only=True)
class TileSize:
    """A tile of logits and the steps of its product."""

    rows: int
    columns: int
    depth: int
    """Terms of a step of the product's sums."""
    warps: int
    stages: int
    """Steps in flight from memory."""
    descriptor: bool = False
    """The tensor memory accelerator loads."""


GROUP = 16
"""Row tiles that go over the columns together; see `grouped`."""
SPLIT_COLUMNS = 2048
"""Columns of one program of `tile_stats`, whatever T: a token's bits do not depend on its
neighbours, and 128 tokens still make 75 programs for 152,000 columns."""

TARGET_SIZES = {
    **dict.fromkeys(("sm_80", "sm_90", "sm_100", "gfx942"), RowSize(rows=4, columns=512, warps=4)),
    INTERPRETER: RowSize(rows=256, columns=2048, warps=1),
}
"""Of `target_logit`; its columns are terms of the sum over H."""

ROW_SIZES = {
    "sm_80": RowSize(rows=1, columns=4096, warps=8),
    "sm_90": RowSize(rows=1, columns=4096, warps=8),
    "sm_100": RowSize(rows=1, columns=4096, warps=8),
    "gfx942": RowSize(rows=1, columns=4096, warps=8),
    # Few large programs: a call of tl.sum takes a millisecond there.
    INTERPRETER: RowSize(rows=512, columns=1024, warps=1),
}
STATS_SIZES = {
    "sm_80": TileSize(rows=128, columns=128, depth=64, warps=8, stages=3),
    "sm_90": TileSize(rows=128, columns=256, depth=64, warps=8, stages=4, descriptor=True),
    "sm_100": TileSize(rows=128, columns=256, depth=64, warps=8, stages=4, descriptor=True),
    "gfx942": TileSize(rows=128, columns=128, depth=32, warps=8, stages=2),
    INTERPRETER: TileSize(rows=512, columns=512, depth=128, warps=1, stages=1, descriptor=True),
}
GRADIENT_SIZES = {
    "sm_80": TileSize(rows=128, columns=128, depth=32, warps=8, stages=3),
    "sm_90": TileSize(rows=128, columns=128, depth=64, warps=8, stages=4, descriptor=True),
    "sm_100": TileSize(rows=128, columns=128, depth=64, warps=8, stages=4, descriptor=True),
    "gfx942": TileSize(rows=128, columns=128, depth=32, warps=8, stages=2),
    INTERPRETER: TileSize(rows=512, columns=512, depth=128, warps=1, stages=1, descriptor=True),
}
FLOAT32_SIZE = TileSize(rows=128, columns=64, depth=32, warps=8, stages=3)
"""Of both, for float32 inputs on every GPU: no tensor core takes part, as TF32 would round, and the
sizes above would not fit in registers."""


def tile_size(sizes: dict[str, TileSize], target: str, itemsize: int) -> TileSize:
    """The size for inputs of so many bytes."""
    return FLOAT32_SIZE if itemsize == 4 and target != INTERPRETER else sizes[target]
