"""The Triton backends of the evidence operations; test_triton_evidence runs this file."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from credit_kernels import VocabShard, dispatch, evidence_loss, evidence_stats
from credit_kernels.evidence import rows, tiles
from credit_kernels.evidence.cases import CASES, fields
from credit_kernels.evidence.contrast import Contrast, Options
from credit_kernels.evidence.moments import finished_stats
from credit_kernels.evidence.operands import Contexts
from credit_kernels.evidence.plan import Plan
from credit_kernels.evidence.tables import SUMS_SIZES, TILE_SIZES
from credit_kernels.targets import INTERPRETER
from credit_kernels.vocab_parallel import merge

NAMED = {case.name: case for case in CASES}
# More than one tile and one block of rows, with fewer of both than for the other backend.
NAMED["many_tiles"] = replace(NAMED["many_tiles"], tokens=70, rows=603, total=603)
NAMED["one_weight"] = replace(NAMED["many_tiles"], name="one_weight", frozen_teacher=False)
REFUSED = ("negatives", "many_tiles", "top_k", "reverse_pair", "reverse_negatives")
MODULES = {"rows": rows, "tiles": tiles}
PROBLEMS = [
    (name, backend) for backend in MODULES for name in NAMED if (name, backend) not in
    [(refused, "tiles") for refused in REFUSED]
]  # fmt: skip
TYPED = [(*problem, torch.float32) for problem in PROBLEMS]
# Every program once.
TYPED += [
    (name, backend, torch.bfloat16)
    for name, backend in PROBLEMS
    if name in ("small", "capped", "reverse", "reverse_negatives")
]
every_backend = pytest.mark.parametrize("backend", MODULES)


def evaluate(function, hidden_CTH, weight_VH, target_T):
    """Outputs, and the gradients of a mixture of the losses in hidden and weight."""
    hidden_CTH = hidden_CTH.detach().clone().requires_grad_()
    weight_VH = weight_VH.detach().clone().requires_grad_()
    outputs = function(hidden_CTH, weight_VH, target_T)
    ramp_T = torch.linspace(-1, 2, len(target_T), dtype=outputs[0].dtype)
    loss = (ramp_T * outputs[0]).sum() + (0.3 * ramp_T.flip(0) * outputs[1]).sum()
    return [*outputs, *torch.autograd.grad(loss, (hidden_CTH, weight_VH))]


def by(case, backend):
    return lambda *inputs: case.compute(*inputs, backend=backend)


def largest(difference):
    return difference.abs().max().item() if difference.numel() else 0.0


def same_bits(values, others):
    return all(torch.equal(a, b) for a, b in zip(values, others, strict=True))


@pytest.mark.parametrize(("name", "backend", "dtype"), TYPED)
def test_error_is_at_most_twice_that_of_eager_torch(name, backend, dtype):
    case = NAMED[name]
    inputs = case.draw(dtype)
    exact = [value.double() if value.is_floating_point() else value for value in inputs]
    truth = evaluate(case.plain, *exact)
    eager = evaluate(case.plain, *inputs)
    mine = evaluate(by(case, backend), *inputs)
    for value, plain, true in zip(mine, eager, truth, strict=True):
        assert largest(value - true) <= 2 * largest(plain - true) + 1e-5
    assert {value.dtype for value in mine[:-2]} == {torch.float32}
    assert {value.dtype for value in mine[-2:]} == {dtype}
    assert mine[-2][1:].eq(0).all()


@pytest.mark.parametrize("name", REFUSED)
def test_what_tiles_cannot_do_is_refused_and_not_chosen(monkeypatch, name):
    inputs = NAMED[name].draw(torch.float32)
    preferred = lambda work: ("tiles", "for the test")  # noqa: E731
    monkeypatch.setattr(dispatch, "_best", preferred)
    expected = NAMED[name].compute(*inputs, backend="rows")
    assert same_bits(NAMED[name].compute(*inputs), expected)
    with pytest.raises(ValueError, match=r"tiles.*; use backend='rows' or 'torch'"):
        NAMED[name].compute(*inputs, backend="tiles")


@pytest.mark.parametrize(("name", "backend"), [("small", "rows"), ("small", "tiles"),
                                               ("reverse_negatives", "rows")])  # fmt: skip
def test_ignored_rows_and_padding_are_never_read(name, backend):
    case = replace(NAMED[name], rows=NAMED[name].total + 3)
    hidden_CTH, weight_VH, target_T = case.draw(torch.float32)
    clean = evaluate(by(case, backend), hidden_CTH, weight_VH, target_T)
    weight_VH[case.total :] = torch.nan
    dirty_CTH = hidden_CTH.masked_fill((target_T < 0)[:, None], torch.nan)
    dirty = evaluate(by(case, backend), dirty_CTH, weight_VH, target_T.where(target_T >= 0, 2**40))
    assert same_bits(clean, dirty)
    assert all(value[..., target_T < 0].eq(0).all() for value in clean[:-2])
    assert clean[-1][case.total :].eq(0).all()


@every_backend
def test_less_memory_changes_rounding_only(monkeypatch, backend):
    case = replace(NAMED["one_weight"], tokens=300, rows=1100, total=1100, ignored=0.0)
    inputs = case.draw(torch.float32)
    usual = evaluate(by(case, backend), *inputs)
    monkeypatch.setattr(MODULES[backend], "chunk_bytes", lambda device: 1)
    if backend == "tiles":
        # More than one split, and slices of the columns.
        monkeypatch.setattr(tiles, "SPLIT_COLUMNS", 512)
        monkeypatch.setattr(tiles, "slice_columns", lambda head: 512)
    for a, b in zip(usual, evaluate(by(case, backend), *inputs), strict=True):
        torch.testing.assert_close(a, b, atol=3e-5, rtol=2e-5)


def test_splits_merge_for_the_reverse_divergence(monkeypatch):
    case = replace(NAMED["reverse"], tokens=12)
    inputs = case.draw(torch.float32)
    usual = evaluate(by(case, "tiles"), *inputs)
    monkeypatch.setattr(tiles, "SPLIT_COLUMNS", 32)
    for sizes in (TILE_SIZES, SUMS_SIZES):
        monkeypatch.setitem(sizes, INTERPRETER, replace(sizes[INTERPRETER], columns=16))
    for a, b in zip(usual, evaluate(by(case, "tiles"), *inputs), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)


MERGED = [
    (name, backend)
    for name, backend in PROBLEMS
    if name in ("small", "pair", "fixed", "near", "reverse", "reverse_fixed", "one_column")
]


@pytest.mark.parametrize(("name", "backend"), MERGED)
def test_unequal_shards_merge_to_the_whole(name, backend):
    case = NAMED[name]
    hidden_CTH, weight_VH, target_T = case.draw(torch.float32)
    truth = case.plain(hidden_CTH.double(), weight_VH.double(), target_T)[2:]
    eager = case.plain(hidden_CTH, weight_VH, target_T)[2:]
    contrast = Contrast.parse(case.contrast, case.contexts)
    plan_options = Options(
        contrast, case.divergence, None, case.temperature, case.softcap, VocabShard(0, 1, 1)
    )
    parts = []
    for start, stop in pairwise([0, case.rows // 3, case.rows, case.rows]):  # the last is empty
        shard = VocabShard(start, stop, case.total, "a group that is never asked")
        contexts, row_R = Contexts.of(
            hidden_CTH, weight_VH[start:stop], None, target_T, replace(plan_options, shard=shard),
            tuple(range(case.contexts)),
        )  # fmt: skip
        plan = Plan.of(contexts.options, case.contexts, kl=True, loss=False)
        parts.append(MODULES[backend].local_moments(contexts, plan))
    stats = finished_stats(merge(parts), contrast, row_R, len(target_T))
    for value, plain, true in zip(fields(stats), eager, truth, strict=True):
        assert largest(value - true) <= 2 * largest(plain - true) + 1e-5


@every_backend
def test_scoring_has_the_bits_of_training_and_of_a_second_run(backend):
    case = NAMED["small"]
    inputs = case.draw(torch.float32)
    first, second = (evaluate(by(case, backend), *inputs) for _ in range(2))
    assert same_bits(first, second)
    with torch.no_grad():
        assert same_bits(case.compute(*inputs, backend=backend), first[:-2])


@every_backend
def test_no_contrast_and_one_context(backend):
    hidden_CTH, weight_VH, target_T = NAMED["small"].draw(torch.float32)
    for count in (1, 3):
        inputs = (hidden_CTH[:count], weight_VH, target_T)
        expected = evidence_stats(*inputs, backend="torch")
        mine = fields(evidence_stats(*inputs, backend=backend))
        for a, b in zip(mine, fields(expected), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@every_backend
def test_float64_is_refused(backend):
    inputs = NAMED["small"].draw(torch.float64)
    with pytest.raises(ValueError, match="use backend='torch' for float64"):
        NAMED["small"].compute(*inputs, backend=backend)


def test_a_loss_reads_only_the_contexts_that_are_named():
    case = replace(NAMED["small"], contexts=6, contrast=("fec", 5, 3, 0))
    hidden_CTH, weight_VH, target_T = case.draw(torch.float32)
    hidden_CTH[[1, 2, 4]] = torch.nan
    inputs = (hidden_CTH, weight_VH, target_T, case.controller(hidden_CTH))
    losses, expected = (
        evidence_loss(*inputs, contrast=case.contrast, backend=backend)
        for backend in ("tiles", "torch")
    )
    torch.testing.assert_close(losses, expected, atol=1e-5, rtol=1e-5)


SHARDED = {
    "small": (0, 17, 50),
    "negatives": (0, 70, 97),
    "top_k": (0, 88, 97),
    "reverse": (0, 31, 97),
    "reverse_negatives": (0, 31, 97),
}


def shard_worker(rank, directory):
    torch.set_num_threads(1)
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    found = {}
    for name, backend in PROBLEMS:
        if name not in SHARDED:
            continue
        case, cut = NAMED[name], SHARDED[name]
        hidden_CTH, weight_VH, target_T = case.draw(torch.float32)
        shard = VocabShard(cut[rank], cut[rank + 1], case.total, dist.group.WORLD)

        def function(hidden_CTH, weight_VH, target_T, case=case, shard=shard, backend=backend):
            return case.compute_on(hidden_CTH, weight_VH, target_T, None, shard, backend=backend)

        part_VH = weight_VH[shard.start : shard.stop]
        values = evaluate(function, hidden_CTH, part_VH, target_T)
        dist.all_reduce(values[-2])
        found[name, backend] = values
    torch.save(found, f"{directory}/{rank}.pt")
    dist.destroy_process_group()


def test_unequal_gloo_shards_equal_one_rank(tmp_path):
    mp.start_processes(shard_worker, (tmp_path,), nprocs=2, start_method="spawn")
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for (name, _), first in found[0].items():
        second = found[1][name, _]
        case = NAMED[name]
        hidden_CTH, weight_VH, target_T = case.draw(torch.float32)
        truth = evaluate(case.plain, hidden_CTH.double(), weight_VH.double(), target_T)
        eager = evaluate(case.plain, hidden_CTH, weight_VH, target_T)
        for values in (first, second):
            for value, plain, true in zip(values[:-1], eager[:-1], truth[:-1], strict=True):
                assert largest(value - true) <= 2 * largest(plain - true) + 1e-5
        weight = torch.cat([first[-1], second[-1]])
        assert largest(weight - truth[-1]) <= 2 * largest(eager[-1] - truth[-1]) + 1e-5
