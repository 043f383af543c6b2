"""Programs of the evidence operations on matrices whose rows lie beyond 2**31 elements.

test_triton_evidence runs this file in the interpreter, whose int32 wraps as that of a GPU does.
"""

import mmap
from dataclasses import replace

import pytest
import torch
from credit_kernels import VocabShard
from credit_kernels.evidence import row_kernels, rows, tile_kernels, tiles
from credit_kernels.evidence.cases import CASES
from credit_kernels.evidence.contrast import Contrast, Options
from credit_kernels.evidence.operands import Contexts
from credit_kernels.evidence.plan import Plan
from credit_kernels.evidence.tables import TILE_SIZES
from credit_kernels.logprob import tiles as logprob_tiles
from credit_kernels.logprob.tiles import Launch
from credit_kernels.targets import INTERPRETER

FAR = 2**30 + 64
"""Fits in int32, as strides do where they can; twice as much does not."""
WRAPPED = 2**31
"""Elements that an offset which wraps may lie before the first."""
NO_RESERVE = 0x4000
"""MAP_NORESERVE of Linux: pages that nothing writes to take no memory."""
ROWS = 3
SMALL = replace({case.name: case for case in CASES}["small"], tokens=ROWS, ignored=0.0)
DIVERGENCES = ("forward", "reverse")


def sparse(shape, strides):
    """Zeros. What lies before them is mapped too: an offset that wraps finds wrong numbers there
    instead of ending the process."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    # Programs read rows to the end of a tile.
    memory = mmap.mmap(
        -1, 4 * (WRAPPED + span + 1024), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    )
    return torch.frombuffer(memory, dtype=torch.float32).as_strided(shape, strides, WRAPPED)


def far_apart(near, strides):
    """The same matrices with other strides."""
    return sparse(near.shape, strides).copy_(near)


def problem(divergence, num_contexts=SMALL.contexts):
    """Contexts with the numbers that every program needs, and a plan of everything."""
    hidden_CTH, weight_VH, target_T = SMALL.draw(torch.float32)
    everyone = tuple(range(num_contexts))
    contrast = Contrast.parse(("fec", 1, 2, num_contexts - 1), num_contexts)
    options = Options(contrast, divergence, None, 1.0, None, VocabShard.whole(SMALL.total))
    inputs = (hidden_CTH[:num_contexts], weight_VH, None, target_T)
    contexts, _ = Contexts.of(*inputs, options, everyone)
    plan = Plan.of(contexts.options, num_contexts, kl=True, loss=True)
    ((_, product_CKV),) = rows.products(contexts)
    contexts, _ = contexts.with_softmaxes(rows.softmaxes(contexts, product_CKV))
    return contexts.with_numbers(torch.randn(plan.slots + 2, ROWS)), plan, product_CKV


def tilted(contexts, plan, product_CKV):
    sums_2K = torch.zeros(2, ROWS)
    program, number_NR = row_kernels.row_tilted, contexts.number_NR
    rows.launch(program, contexts, plan, product_CKV, number_NR, sums_2K)
    return sums_2K


# The last overwrites the products.
ROW_PROGRAMS = {
    "row_sums": rows.sums,
    "row_tilted": tilted,
    "row_gradient": rows.product_gradient,
}
APART = {"rows": (512, FAR, 1), "contexts": (FAR, 1024, 1)}


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("program", ROW_PROGRAMS)
@pytest.mark.parametrize("apart", APART)
def test_products_beyond_int32_are_reached(divergence, program, apart):
    contexts, plan, product_CKV = problem(divergence)
    far_CKV = far_apart(product_CKV, APART[apart])
    compute = ROW_PROGRAMS[program]
    found, expected = (compute(contexts, plan, each) for each in (far_CKV, product_CKV))
    assert expected.abs().amax(-1).gt(0).any()
    assert torch.equal(found, expected)


def sums_of(program, count, numbers):
    def compute(those, plan):
        given = those.contexts.number_NR
        return torch.cat([*those.split_sums(program, count(plan), *[given][:numbers])])

    return compute


def gradient(those, plan):
    grad_RS = torch.zeros(ROWS, 512)
    columns = slice(0, SMALL.total)
    those.write_gradient(grad_RS[:, : SMALL.total], columns, those.contexts.number_NR)
    return grad_RS[:, : SMALL.total]


TILE_PROGRAMS = {
    "tile_softmax": sums_of(tile_kernels.tile_softmax, lambda plan: 3 * plan.contexts, 0),
    "tile_sums": sums_of(tile_kernels.tile_sums, lambda plan: plan.count, 1),
    "tile_tilted": sums_of(tile_kernels.tile_tilted, lambda plan: 2, 1),
    "tile_gradient": gradient,
}


@pytest.mark.parametrize("program", TILE_PROGRAMS)
@pytest.mark.parametrize("descriptor", [True, False])
@pytest.mark.parametrize("operand", ["hidden", "weight"])
def test_operands_beyond_int32_are_reached(monkeypatch, program, descriptor, operand):
    monkeypatch.setattr(logprob_tiles, "_can_be_described", lambda matrix: descriptor)
    contexts, plan, _ = problem("forward")
    near = tiles.Tiles(contexts.hidden_CRH, contexts.weight_VH, contexts, plan)
    if operand == "hidden":
        far = replace(near, hidden_CRH=far_apart(near.hidden_CRH, (ROWS * FAR, FAR, 1)))
    else:
        far = replace(near, weight_VH=far_apart(near.weight_VH, (FAR, 1)))
    compute = TILE_PROGRAMS[program]
    expected = compute(near, plan)
    assert expected.abs().sum() > 0
    assert torch.equal(compute(far, plan), expected)


def test_a_gradient_beyond_int32_is_reached():
    contexts, plan, _ = problem("forward")
    those = tiles.Tiles(contexts.hidden_CRH, contexts.weight_VH, contexts, plan)
    expected = gradient(those, plan)
    far_RS = sparse((ROWS, 512), (FAR, 1))[:, : SMALL.total]
    those.write_gradient(far_RS, slice(0, SMALL.total), contexts.number_NR)
    assert expected.abs().amax(-1).gt(0).all()
    assert torch.equal(far_RS, expected)


def launched(program, hidden_CRH, weight_VH, sums_NSR, plan, numbers, num_rows, stop_row):
    """One of the programs on the first block of rows that stop anywhere, over every split."""
    launch = Launch.of(hidden_CRH.flatten(0, 1), weight_VH, TILE_SIZES[INTERPRETER], False)
    program[(sums_NSR.shape[1],)](
        *launch.sources,
        *numbers,
        sums_NSR,
        num_rows,
        *launch.extents[1:],
        0,
        stop_row,
        1.0,
        1.0,
        PLAN=plan,
        SPLIT=256,
        # Those of the first block are the first programs.
        **launch.constants | {"GROUP": 1},
    )


@pytest.mark.parametrize(
    ("program", "count", "numbers"),
    [
        (tile_kernels.tile_softmax, lambda plan: 3 * plan.contexts, 0),
        (tile_kernels.tile_sums, lambda plan: plan.count, 1),
        (tile_kernels.tile_tilted, lambda plan: 2, 1),
    ],
    ids=["tile_softmax", "tile_sums", "tile_tilted"],
)
def test_sums_beyond_int32_are_reached(program, count, numbers):
    # Three splits, the last of which lies beyond, and so does the second number of each.
    size, num_splits = TILE_SIZES[INTERPRETER].rows, 3
    contexts, plan, _ = problem("forward")
    hidden_CRH = contexts.hidden_CRH.repeat(1, 22, 1)[:, :size].contiguous()
    weight_VH = torch.randn(256 * num_splits, SMALL.hidden)
    given = [contexts.number_NR.repeat(1, 22)[:, :size].contiguous()][:numbers]
    shape = (count(plan), num_splits, size)
    near, far = torch.zeros(shape), sparse(shape, (num_splits * FAR, FAR, 1))
    launched(program, hidden_CRH, weight_VH, near, plan, given, size, size)
    launched(program, hidden_CRH, weight_VH, far, plan, given, size, FAR)
    assert near.abs().amax((1, 2)).gt(0).sum() > 1
    assert torch.equal(far, near)


def test_contexts_of_very_many_rows_are_reached(monkeypatch):
    # The third context starts beyond 2**31 rows of one column each.
    monkeypatch.setattr(logprob_tiles, "_can_be_described", lambda matrix: False)
    contexts, plan, _ = problem("forward", num_contexts=3)
    hidden_CRH, weight_VH = contexts.hidden_CRH[..., :1], contexts.weight_VH[:, :1].contiguous()
    shape = (3 * plan.contexts, 1, ROWS)
    near, far = torch.zeros(shape), torch.zeros(shape)
    launched(
        tile_kernels.tile_softmax, hidden_CRH.contiguous(), weight_VH, near, plan, (), ROWS, ROWS
    )
    many_CRH = sparse((3, FAR, 1), (FAR, 1, 1))
    many_CRH[:, :ROWS] = hidden_CRH
    launched(tile_kernels.tile_softmax, many_CRH, weight_VH, far, plan, (), FAR, ROWS)
    assert torch.equal(far, near)
