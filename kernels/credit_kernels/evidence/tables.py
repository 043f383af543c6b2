"""Tile sizes by target; `python kernels/quality` compiles these very sizes.

Fixed, as those of `logprob.tables`, and for the same reasons.
"""

from credit_kernels.evidence.contrast import Options
from credit_kernels.logprob.tables import RowSize, TileSize
from credit_kernels.targets import INTERPRETER

MOST_CONTEXTS = 4
"""Of a tile program: the products of so many fit in the registers."""
SPLIT_COLUMNS = 2048
"""Columns of one program of `tile_sums`, whatever T."""

ROW_SIZES = {
    **dict.fromkeys(("sm_80", "sm_90", "sm_100", "gfx942"), RowSize(rows=1, columns=2048, warps=8)),
    INTERPRETER: RowSize(rows=64, columns=256, warps=1),
}
"""Of programs that read the products of all contexts of a row."""

TILE_SIZES = {
    "sm_80": TileSize(rows=64, columns=64, depth=32, warps=8, stages=3),
    "sm_90": TileSize(rows=128, columns=64, depth=64, warps=8, stages=3, descriptor=True),
    "sm_100": TileSize(rows=128, columns=64, depth=64, warps=8, stages=3, descriptor=True),
    "gfx942": TileSize(rows=64, columns=64, depth=32, warps=8, stages=2),
    INTERPRETER: TileSize(rows=64, columns=256, depth=32, warps=1, stages=1, descriptor=True),
}
"""Of programs that make the products of all contexts of a tile."""
SUMS_SIZES = TILE_SIZES | {
    "sm_80": TileSize(rows=128, columns=32, depth=32, warps=8, stages=3),
    "sm_90": TileSize(rows=128, columns=32, depth=64, warps=8, stages=3, descriptor=True),
}
"""Of `tile_sums`, which has more alive beside the products."""
CAPPED_SIZES = {
    "sm_100": TileSize(rows=128, columns=32, depth=64, warps=8, stages=3, descriptor=True)
}
"""Of all of them with a softcap, which needs registers of its own, where the others would spill."""
FLOAT32_SIZE = TileSize(rows=16, columns=32, depth=16, warps=4, stages=2)
"""Of all of them for float32 inputs, which no tensor core takes."""


def tile_size(sizes: dict[str, TileSize], target: str, itemsize: int, *, capped: bool) -> TileSize:
    """The size for inputs of so many bytes, with or without a softcap."""
    if target == INTERPRETER:
        return sizes[target]
    if itemsize == 4:
        return FLOAT32_SIZE
    return CAPPED_SIZES.get(target, sizes[target]) if capped else sizes[target]


def refusal_of_tiles(options: Options, num_contexts: int, has_teacher_weight: bool) -> str | None:
    """Why the backend `tiles` cannot serve this many contexts, and what does; None if it can."""
    contrast = options.contrast
    problems = [
        (num_contexts > MOST_CONTEXTS, f"{num_contexts} contexts, more than {MOST_CONTEXTS}"),
        (has_teacher_weight, "the teachers have an output weight of their own"),
        (options.top_k is not None, f"top_k={options.top_k} needs a pass over the logits first"),
        (contrast is not None and contrast.is_mixed, "several negatives need another pass"),
    ]
    reasons = [reason for applies, reason in problems if applies]
    return f"{'; '.join(reasons)}; use backend='rows' or 'torch'" if reasons else None
