"""The programs as a launch on each target would compile them: types, constants and tile sizes.

H and the strides are multiples of 16 elements, as in every real model; rows are any number.
"""

from dataclasses import dataclass, field
from typing import Any

import triton
from credit_kernels.logprob import kernels
from credit_kernels.logprob.tables import (
    FLOAT32_SIZE,
    GRADIENT_SIZES,
    GROUP,
    ROW_SIZES,
    SPLIT_COLUMNS,
    STATS_SIZES,
    TARGET_SIZES,
    TileSize,
)
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TYPES = {
    "num_rows": "i32",
    "num_columns": "i32",
    "H": "i32",
    "stride_r": "i32",
    "stride_c": "i32",
    "stride_g": "i32",
    "stride_n": "i32",
    "stride_v": "i32",
    "first_row": "i32",
    "stop_row": "i32",
    "scale": "fp32",
    "softcap": "fp32",
    "column_ptr": "*i32",
    "products_ptr": "*fp32",
    "grad_ptr": "*bf16",
    "hidden_ptr": "*bf16",
    "weight_ptr": "*bf16",
    "max_ptr": "*fp32",
    "sum_ptr": "*fp32",
    "moment_ptr": "*fp32",
    "logit_ptr": "*fp32",
    "grad_logprob_ptr": "*fp32",
    "factor_ptr": "*fp32",
    "slope_ptr": "*fp32",
    "numbers_ptr": "*fp32",
    "sums_ptr": "*fp32",
}
"""Types of runtime arguments by name; the same name means the same thing in every program."""
UNALIGNED = {
    "num_rows", "num_columns", "stride_n", "first_row", "stop_row", "scale", "softcap"
}  # fmt: skip
"""Arguments that need not be multiples of 16."""

TILE_PROGRAMS = {
    "tile_stats": (kernels.tile_stats, {"SPLIT": SPLIT_COLUMNS}),
    "tile_gradient": (kernels.tile_gradient, {}),
}
TILE_SIZES = {"tile_stats": STATS_SIZES, "tile_gradient": GRADIENT_SIZES}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One program for one target."""

    name: str
    target: str
    program: Any
    constants: dict[str, Any]
    warps: int
    stages: int = 1
    types: dict[str, str] = field(default_factory=dict)
    """Of the arguments that have another type than in TYPES."""
    tile: tuple[int, int] | None = None
    """Rows and columns of a product by tensor cores; None for a program that makes none."""

    def compile(self) -> CompiledKernel:
        """The binary and its metadata, from Triton's cache where it has them."""
        names = self.program.arg_names
        types = {
            name: "constexpr" if name in self.constants else (TYPES | self.types)[name]
            for name in names
        }
        aligned = [
            index
            for index, name in enumerate(names)
            if name not in UNALIGNED | self.constants.keys() and "desc" not in types[name]
        ]
        source = ASTSource(
            fn=self.program,
            signature=types,
            constexprs={(names.index(name),): value for name, value in self.constants.items()},
            attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
        )
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return triton.compile(source, target=TARGETS[self.target], options=options)


def row_jobs(target: str) -> list[Job]:
    """Programs that go over rows in memory."""
    row, dot = ROW_SIZES[target], TARGET_SIZES[target]
    sizes = {"ROWS": row.rows, "COLUMNS": row.columns, "CAPPED": False}
    dots = {"ROWS": dot.rows, "DEPTH": dot.columns, "CAPPED": False}
    programs = {
        "row_stats": (kernels.row_stats, sizes, row.warps),
        "row_gradient": (kernels.row_gradient, sizes, row.warps),
        "target_logit": (kernels.target_logit, dots, dot.warps),
    }
    return [
        Job(name=name, target=target, program=program, constants=constants, warps=warps)
        for name, (program, constants, warps) in programs.items()
    ]


def tile_job(
    name: str, target: str, size: TileSize, *, dtype: str = "bf16", capped: bool = False
) -> Job:
    """A program that makes tiles of products."""
    program, constants = TILE_PROGRAMS[name]
    suffix = ("_capped" if capped else "") + ("" if dtype == "bf16" else "_float32")
    types = dict.fromkeys(("hidden", "weight", "grad_ptr"), f"*{dtype}")
    if size.descriptor:
        types["hidden"] = f"tensordesc<{dtype}[{size.rows}, {size.depth}]>"
        types["weight"] = f"tensordesc<{dtype}[{size.columns}, {size.depth}]>"
    shape = {
        "ROWS": size.rows,
        "COLUMNS": size.columns,
        "DEPTH": size.depth,
        "GROUP": GROUP,
        "DESCRIPTOR": size.descriptor,
        "EVEN": True,
        "CAPPED": capped,
        "UPCAST": False,
    }
    return Job(
        name=name + suffix,
        target=target,
        program=program,
        constants=shape | constants,
        warps=size.warps,
        stages=size.stages,
        types=types,
        tile=(size.rows, size.columns) if dtype == "bf16" else None,
    )


def all_jobs() -> list[Job]:
    """Every program for every target."""
    jobs = []
    for target in TARGETS:
        jobs += row_jobs(target)
        for name, sizes in TILE_SIZES.items():
            size = sizes[target]
            jobs += [tile_job(name, target, size, capped=capped) for capped in (False, True)]
            jobs.append(tile_job(name, target, FLOAT32_SIZE, dtype="fp32"))
    return jobs
