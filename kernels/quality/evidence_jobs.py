"""The programs of the evidence operations, with the plans that need most.

A plan is `complete` where the sums of several ranks will be merged, which needs more of them.
"""

from credit_kernels.evidence import row_kernels, tile_kernels
from credit_kernels.evidence.plan import Plan
from credit_kernels.evidence.tables import (
    ROW_SIZES,
    SPLIT_COLUMNS,
    SUMS_SIZES,
    TILE_SIZES,
    tile_size,
)
from credit_kernels.logprob.tables import GROUP, TileSize
from jobs import TARGETS, Job

ROLES = {"contrast": True, "positive": 1, "negative": 2}
THREE = Plan(contexts=3, kl=True, **ROLES)
"""What the controller reads where the student is its own evidence-free teacher."""
FOUR = Plan(contexts=4, kl=True, free=3, complete=True, **ROLES)
LOSS = Plan(contexts=4, loss=True, free=3, complete=True, **ROLES)
REVERSE = Plan(contexts=4, loss=True, free=3, complete=True, reverse=True, **ROLES)

ROWS = {
    "evidence_row_sums": (row_kernels.row_sums, FOUR),
    "evidence_row_gradient": (row_kernels.row_gradient, REVERSE),
}
TILES = {
    "evidence_tile_softmax": (tile_kernels.tile_softmax, FOUR, TILE_SIZES),
    "evidence_tile_sums_3": (tile_kernels.tile_sums, THREE, SUMS_SIZES),
    "evidence_tile_sums": (tile_kernels.tile_sums, FOUR, SUMS_SIZES),
    "evidence_tile_loss": (tile_kernels.tile_sums, LOSS, SUMS_SIZES),
    "evidence_tile_reverse": (tile_kernels.tile_sums, REVERSE, SUMS_SIZES),
    "evidence_tile_gradient": (tile_kernels.tile_gradient, LOSS, TILE_SIZES),
}
NEEDIEST = (
    "evidence_tile_softmax",
    "evidence_tile_sums",
    "evidence_tile_reverse",
    "evidence_tile_gradient",
)
"""Those that are compiled with a softcap and for float32 too."""


def row_job(name: str, target: str) -> Job:
    """A program that goes over rows in memory."""
    program, plan = ROWS[name]
    size = ROW_SIZES[target]
    constants = {"PLAN": plan, "ROWS": size.rows, "COLUMNS": size.columns, "CAPPED": False}
    return Job(name=name, target=target, program=program, constants=constants, warps=size.warps)


def tile_job(name: str, target: str, *, dtype: str = "bf16", capped: bool = False) -> Job:
    """A program that makes tiles of products, counted for all contexts together."""
    program, plan, sizes = TILES[name]
    size: TileSize = tile_size(sizes, target, 4 if dtype == "fp32" else 2, capped=capped)
    types = {"hidden": f"*{dtype}", "weight": f"*{dtype}"}
    if size.descriptor:
        types["hidden"] = f"tensordesc<{dtype}[{size.rows}, {size.depth}]>"
        types["weight"] = f"tensordesc<{dtype}[{size.columns}, {size.depth}]>"
    constants = {
        "PLAN": plan,
        "ROWS": size.rows,
        "COLUMNS": size.columns,
        "DEPTH": size.depth,
        "GROUP": GROUP,
        "DESCRIPTOR": size.descriptor,
        "EVEN": True,
        "CAPPED": capped,
        "UPCAST": False,
    }
    if "SPLIT" in program.arg_names:
        constants["SPLIT"] = SPLIT_COLUMNS
    suffix = "_float32" * (dtype == "fp32") + "_capped" * capped
    return Job(
        name=name + suffix,
        target=target,
        program=program,
        constants=constants,
        warps=size.warps,
        stages=size.stages,
        types=types,
        # Tensor cores do not take float32.
        tile=None if dtype == "fp32" else (plan.contexts * size.rows, size.columns),
    )


def evidence_jobs() -> list[Job]:
    """Every program for every target."""
    return [
        job
        for target in TARGETS
        for job in (
            *(row_job(name, target) for name in ROWS),
            *(tile_job(name, target) for name in TILES),
            *(tile_job(name, target, capped=True) for name in NEEDIEST),
            *(tile_job(name, target, dtype="fp32", capped=True) for name in NEEDIEST),
        )
    ]
