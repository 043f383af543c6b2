"""What a compiled program will cost, read from its machine code; no GPU takes part."""

import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.compiler import CompiledKernel

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
TENSOR_CORE = {
    "sm_80": ("HMMA",),
    "sm_90": ("HGMMA",),
    "sm_100": ("UTCHMMA",),
    "gfx942": ("v_mfma",),
}
ASYNC_COPY = ("LDGSTS", "UTMALDG")
EXP2 = ("MUFU.EX2", "v_exp_f32")
STORE = ("STG", "global_store")
SPILL = ("STL", "LDL")

DENSE_FLOP_PER_CLOCK = {"sm_80": 2048, "sm_90": 4096, "sm_100": 8192, "gfx942": 2048}
"""bfloat16 on the tensor cores of one SM or CU."""
LANES_PER_CLOCK = {"sm_80": 128, "sm_90": 128, "sm_100": 128, "gfx942": 64}
"""Ordinary instructions of one SM or CU."""
EXP2_PER_CLOCK = 16
HIDDEN = 4096
"""H for which the epilogue is set against the product."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one program on one target."""

    registers: int
    """Of a thread; on gfx942 vector registers, accumulators among them."""
    spills: int
    """Instructions that move registers to memory or back."""
    shared_bytes: int
    tensor_core: int
    """Instructions."""
    async_copy: int
    """Instructions that load memory without passing through registers."""
    epilogue_percent: float | None
    """Estimate: what is done per logit after the product, in percent of the tensor cores' time for
    the product with H = 4096, if nothing overlapped. None for programs without a product."""


def cost_of(kernel: CompiledKernel, target: str, tile: tuple[int, int] | None) -> Cost:
    """Read from the binary."""
    if target == "gfx942":
        listing = kernel.asm["amdgcn"]
        blocks = list(_blocks(listing.splitlines(), r"^\.LBB[0-9_]+:", r"^\s+([a-z]+_[a-z0-9_]+)"))
        registers = _number(r"\.vgpr_count:\s+(\d+)", listing)
        spills = _number(r"\.vgpr_spill_count:\s+(\d+)", listing)
        spills += _number(r"\.sgpr_spill_count:\s+(\d+)", listing)
    else:
        usage, listing = _nvidia_listings(kernel.asm["cubin"])
        blocks = list(
            _blocks(
                listing.splitlines(),
                r"^\s*\.L_x_\d+:",
                r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)",
            )
        )
        registers = _number(r"REG:(\d+)", usage)
        spills = sum(_count(block, SPILL) for block in blocks)
    tensor_core = TENSOR_CORE[target]
    return Cost(
        registers=registers,
        spills=spills,
        shared_bytes=kernel.metadata.shared,
        tensor_core=sum(_count(block, tensor_core) for block in blocks),
        async_copy=sum(_count(block, ASYNC_COPY) for block in blocks),
        epilogue_percent=_epilogue_percent(blocks, target, tile, kernel),
    )


def _epilogue_percent(
    blocks: list[list[str]], target: str, tile: tuple[int, int] | None, kernel: CompiledKernel
) -> float | None:
    """From the blocks that take exponentials or store results: issue slots, or exponentials."""
    if tile is None:
        return None
    rows, columns = tile
    lanes = kernel.metadata.num_warps * (64 if target == "gfx942" else 32)
    product = 2 * rows * columns * HIDDEN / DENSE_FLOP_PER_CLOCK[target]
    epilogue = [block for block in blocks if _count(block, EXP2 + STORE)]
    # Where the compiler has put the two into one block, the product's instructions do not count.
    instructions = sum(len(block) - _count(block, TENSOR_CORE[target]) for block in epilogue)
    exponentials = sum(_count(block, EXP2) for block in epilogue)
    clocks = max(
        instructions * lanes / LANES_PER_CLOCK[target], exponentials * lanes / EXP2_PER_CLOCK
    )
    return round(100 * clocks / product, 1)


def _nvidia_listings(cubin: bytes) -> tuple[str, str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        commands = (["cuobjdump", "-res-usage", file.name], ["nvdisasm", "-c", file.name])
        usage, listing = (
            subprocess.run([TOOLS / tool, *rest], capture_output=True, text=True, check=True).stdout
            for tool, *rest in commands
        )
    return usage, listing


def _blocks(lines: Iterable[str], label: str, instruction: str) -> Iterable[list[str]]:
    """Names of the instructions between two labels, for each stretch."""
    block: list[str] = []
    for line in lines:
        if re.search(label, line):
            yield block
            block = []
        elif found := re.search(instruction, line):
            block.append(found.group(1))
    yield block


def _count(block: list[str], prefixes: tuple[str, ...]) -> int:
    return sum(name.startswith(prefixes) for name in block)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"no {pattern!r} in the listing of the binary")
    return int(found.group(1))
