"""The evidence operations over Gloo shards of unequal size equal one rank, values and gradients."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from credit_kernels import VocabShard, evidence_loss, evidence_stats, vocab_parallel
from credit_kernels.evidence.cases import CASES
from credit_kernels.evidence.contrast import Contrast, Options
from credit_kernels.evidence.moments import finished_stats
from credit_kernels.evidence.passes import local_moments
from credit_kernels.evidence.views import Views
from credit_kernels.vocab_parallel import merge

WORLD = 3
NAMED = {case.name: case for case in CASES}
# Unequal cuts, an empty shard and shards that are all padding, for groups of 2 and of 3 ranks.
CUTS = {
    2: {
        "small": (0, 17, 50),
        "capped": (0, 90, 97),
        "free_student": (0, 60, 97),
        "all_ignored": (0, 3, 7),
        "many_tiles": (0, 1001, 1203),
        "negatives": (0, 70, 97),
        "top_k": (0, 88, 97),
        "reverse": (0, 31, 97),
        "reverse_negatives": (0, 31, 97),
        "near": (0, 48, 97),
    },
    3: {
        "small": (0, 17, 17, 50),
        "pair": (0, 50, 93, 97),
        "fixed": (0, 10, 90, 97),
        "far_below_zero": (0, 1, 60, 97),
        "far_above_zero": (0, 333, 600, 700),
        "no_row": (0, 2, 4, 5),
        "one_column": (0, 0, 1, 1),
        "negatives": (0, 5, 60, 97),
        "top_k": (0, 3, 60, 97),
        "sure": (0, 30, 40, 97),
        "reverse": (0, 31, 93, 97),
        "reverse_pair": (0, 31, 50, 97),
        "reverse_fixed": (0, 0, 80, 97),
        "reverse_negatives": (0, 31, 93, 97),
    },
}
PROBLEMS = [(size, name) for size, cuts in CUTS.items() for name in cuts]
HIDDEN_GRADIENT, WEIGHT_GRADIENT = -2, -1


def evaluate(function, hidden_CTH, weight_VH):
    """Outputs, and the gradients of a mixture of the losses in hidden and weight."""
    hidden_CTH = hidden_CTH.clone().requires_grad_()
    weight_VH = weight_VH.clone().requires_grad_()
    outputs = function(hidden_CTH, weight_VH)
    ramp_T = torch.linspace(-1, 2, hidden_CTH.shape[1])
    loss = (ramp_T * outputs[0]).sum() + (ramp_T.flip(0) * outputs[1]).sum()
    return [*outputs, *torch.autograd.grad(loss, (hidden_CTH, weight_VH))]


def sharded(case, cut, rank, group, inputs):
    """This rank's shard's values, with the gradient of hidden summed over the group."""
    hidden_CTH, weight_VH, target_T = inputs
    part = slice(cut[rank], cut[rank + 1])
    shard = VocabShard(part.start, part.stop, case.total, group)
    teacher_VH = case.teacher_weight(weight_VH)

    def function(hidden_CTH, weight_VH):
        own_teacher_VH = None if teacher_VH is None else teacher_VH[part]
        return case.compute_on(hidden_CTH, weight_VH, target_T, own_teacher_VH, shard)

    values = evaluate(function, hidden_CTH, weight_VH[part])
    dist.all_reduce(values[HIDDEN_GRADIENT], group=group)
    return values


def largest(difference):
    return difference.abs().max().item() if difference.numel() else 0.0


def errors(case, cut, rank, group, dtype):
    """For each quantity, the error of the shards and that of eager torch on one rank."""
    hidden_CTH, weight_VH, target_T = case.draw(dtype)
    exact = hidden_CTH.double(), weight_VH.double()
    truth = evaluate(lambda h, w: case.plain(h, w, target_T), *exact)
    eager = evaluate(lambda h, w: case.plain(h, w, target_T), hidden_CTH, weight_VH)
    mine = sharded(case, cut, rank, group, (hidden_CTH, weight_VH, target_T))
    part = slice(cut[rank], cut[rank + 1])
    eager_errors = [largest(a - b) for a, b in zip(eager, truth, strict=True)]
    truth[WEIGHT_GRADIENT] = truth[WEIGHT_GRADIENT][part]
    return [(largest(a - b), e) for a, b, e in zip(mine, truth, eager_errors, strict=True)]


def shard_worker(rank, directory):
    torch.set_num_threads(1)
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    groups = {size: dist.new_group(list(range(size))) for size in CUTS}
    found = {
        (size, name, dtype): errors(NAMED[name], CUTS[size][name], rank, groups[size], dtype)
        for size, name in PROBLEMS
        for dtype in (torch.float32, torch.float64)
        if rank < size
    }
    torch.save(found, directory / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Of each rank, (size, name, type) -> pairs of errors; one set of processes for all."""
    directory = tmp_path_factory.mktemp("shards")
    mp.start_processes(shard_worker, (directory,), nprocs=WORLD, start_method="spawn")
    return [torch.load(directory / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize(("size", "name"), PROBLEMS)
def test_unequal_shards_equal_one_rank(found, size, name):
    offset = abs(NAMED[name].offset)
    for rank in range(size):
        for index, (mine, eager) in enumerate(found[rank][size, name, torch.float32]):
            # Parts as large as the offset cancel in the sum over the shards: 16 roundings of them.
            cancelled = 2**-20 * offset if index == 10 else 0.0
            assert mine <= 2 * eager + 1e-5 + cancelled, (rank, index)
        # Shards add up squares that are not centred: one part in 10^16 of them stays behind, beside
        # the 10^-8 that alpha of a student sure of its token is divided by.
        bound = 1e-5 if name == "sure" else 1e-9
        for index, (mine, _) in enumerate(found[rank][size, name, torch.float64]):
            assert mine < bound, (rank, index)


MERGED = ("small", "pair", "fixed", "near", "reverse", "one_column")


@pytest.mark.parametrize("name", MERGED)
def test_shards_merge_to_the_whole(name):
    case = NAMED[name]
    hidden_CTH, weight_VH, target_T = case.draw(torch.float64)
    cuts = [0, case.rows // 5, case.rows // 2, case.rows, case.rows]  # the last shard is empty
    parts = []
    for start, stop in pairwise(cuts):
        shard = VocabShard(start, stop, case.total, "a group that is never asked")
        contrast = Contrast.parse(case.contrast, case.contexts)
        options = Options(contrast, case.divergence, None, case.temperature, case.softcap, shard)
        part = slice(start, stop)
        views, row_R = Views.of(hidden_CTH, weight_VH[part], None, target_T, options)
        parts.append(local_moments(views, with_kl=True, with_loss=True))
    whole = case.plain(hidden_CTH, weight_VH, target_T)
    for order in (parts, parts[::-1]):
        stats = finished_stats(merge(order), contrast, row_R, len(target_T))
        expected = whole[2:]
        mine = (stats.logprob_CT, stats.entropy_CT, stats.kl_teacher_student_CT,
                stats.kl_student_teacher_CT, stats.alpha_T, stats.target_T, stats.mean_T,
                stats.cost_T)  # fmt: skip
        for value, true in zip(mine, expected, strict=True):
            torch.testing.assert_close(value, true, atol=1e-11, rtol=1e-8)


def recorded(monkeypatch):
    """The collectives that are asked for, in order; they do nothing."""
    operations = []

    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None):
        operations.append("max" if op == dist.ReduceOp.MAX else "sum")

    def all_gather(parts, tensor, group=None):
        operations.append("gather")
        parts[0].copy_(tensor)

    monkeypatch.setattr(vocab_parallel.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(vocab_parallel.dist, "all_gather", all_gather)
    monkeypatch.setattr(vocab_parallel.dist, "get_world_size", lambda group: 1)
    return operations


ONE_REDUCTION = ["max", "sum"]


@pytest.mark.parametrize(
    ("options", "of_stats", "more_of_loss"),
    [
        ({"contrast": ("fec", 1, 2, 3)}, ONE_REDUCTION, []),
        ({"contrast": ("fec", 1, 2, 3), "divergence": "reverse"}, ONE_REDUCTION, ONE_REDUCTION),
        ({"contrast": ("fec", 1, (2, 3), 0)}, ONE_REDUCTION * 2, []),
        ({"contrast": ("pair", 1, 2, 0), "top_k": 3}, ["gather", *ONE_REDUCTION], []),
    ],
)
def test_all_reduces_however_many_blocks(monkeypatch, options, of_stats, more_of_loss):
    operations = recorded(monkeypatch)
    hidden_CTH = torch.randn(4, 20, 4, requires_grad=True)
    inputs = hidden_CTH, torch.randn(33, 4), torch.arange(20)
    shard = VocabShard(0, 33, 40, "the group")
    evidence_stats(*inputs, shard=shard, **options)
    assert operations == of_stats
    operations.clear()
    losses = evidence_loss(*inputs, torch.rand(20), shard=shard, **options)
    (losses[0] + losses[1]).sum().backward()
    assert operations == of_stats + more_of_loss
