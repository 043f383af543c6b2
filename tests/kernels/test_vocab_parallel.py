"""linear_logprob over Gloo shards of unequal size equals one rank, in values and gradients.

By the backends that KERNEL_BACKENDS names; test_triton starts this file again for those of Triton.
"""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from credit_kernels import VocabShard, linear_logprob, vocab_parallel
from credit_kernels.logprob import head as head_module
from credit_kernels.logprob.cases import CASES

WORLD = 3
# Unequal cuts, an empty shard and shards that are all padding, for groups of 2 and of 3 ranks.
CUTS = {
    2: {
        "small": (0, 17, 50),
        "padded": (0, 600, 640),
        "capped": (0, 90, 97),
        "all_ignored": (0, 3, 7),
        "many_tiles": (0, 1001, 1203),
    },
    3: {
        "small": (0, 17, 17, 50),
        "padded": (0, 100, 520, 640),
        "hot": (0, 50, 60, 97),
        "far_below_zero": (0, 1, 60, 97),
        "far_above_zero": (0, 333, 600, 700),
        "no_row": (0, 2, 4, 5),
        "one_column": (0, 0, 1, 1),
    },
}
BACKENDS = os.environ.get("KERNEL_BACKENDS", "torch").split()
PROBLEMS = [(b, size, name) for b in BACKENDS for size, cuts in CUTS.items() for name in cuts]
QUANTITIES = ("logprob", "entropy", "hidden gradient", "weight gradient")


def mixture(logprob_T, entropy_T):
    generator = torch.Generator().manual_seed(3)
    weight_T = torch.randn(len(logprob_T), generator=generator)
    return (weight_T * logprob_T + 0.3 * weight_T.flip(0) * entropy_T).sum()


def evaluate(function, hidden_TH, weight_VH, target_T):
    hidden_TH = hidden_TH.clone().requires_grad_()
    weight_VH = weight_VH.clone().requires_grad_()
    outputs = function(hidden_TH, weight_VH, target_T)
    return [*outputs, *torch.autograd.grad(mixture(*outputs), (hidden_TH, weight_VH))]


def sharded(case, cut, rank, group, inputs, backend):
    """This rank's shard's values, with the gradient of hidden summed over the group."""
    part = slice(cut[rank], cut[rank + 1])
    shard = VocabShard(part.start, part.stop, case.total, group)

    def function(hidden_TH, weight_VH, target_T):
        return linear_logprob(
            hidden_TH,
            weight_VH,
            target_T,
            shard=shard,
            temperature=case.temperature,
            softcap=case.softcap,
            backend=backend,
            return_entropy=True,
        )

    hidden_TH, weight_VH, target_T = inputs
    values = evaluate(function, hidden_TH, weight_VH[part], target_T)
    dist.all_reduce(values[2], group=group)
    return values


def largest(difference):
    return difference.abs().max().item() if difference.numel() else 0.0


def errors(case, cut, rank, group, backend):
    """For each quantity, the error of the shards and that of eager torch on one rank."""
    inputs = case.draw(torch.float32)
    truth = evaluate(case.plain, inputs[0].double(), inputs[1].double(), inputs[2])
    eager = evaluate(case.plain, *inputs)
    mine = sharded(case, cut, rank, group, inputs, backend)
    part = slice(cut[rank], cut[rank + 1])
    pairs = []
    for index in range(len(QUANTITIES)):
        own = part if index == 3 else slice(None)
        own_error = largest(mine[index] - truth[index][own])
        pairs.append((own_error, largest(eager[index] - truth[index])))
    return pairs


def shard_worker(rank, store, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    groups = {size: dist.new_group(list(range(size))) for size in CUTS}
    cases = {case.name: case for case in CASES}
    for backend, size, name in PROBLEMS:
        if rank < size:
            found = errors(cases[name], CUTS[size][name], rank, groups[size], backend)
            results.put((backend, size, name, rank, found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """(backend, size, name, rank) -> pairs of errors; one set of processes for all problems."""
    store = tmp_path_factory.mktemp("shards") / "store"
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    workers = [
        context.Process(target=shard_worker, args=(rank, store, results)) for rank in range(WORLD)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0] * WORLD
    answers = [results.get() for _ in range(sum(size for _, size, _ in PROBLEMS))]
    return {(backend, size, name, rank): pairs for backend, size, name, rank, pairs in answers}


@pytest.mark.parametrize(("backend", "size", "name"), PROBLEMS)
def test_unequal_shards_equal_one_rank(found, backend, size, name):
    offset = next(abs(case.offset) for case in CASES if case.name == name)
    for rank in range(size):
        pairs = found[backend, size, name, rank]
        for quantity, (mine, eager) in zip(QUANTITIES, pairs, strict=True):
            # Parts as large as the offset cancel in the sum over the shards: 16 roundings of them.
            cancelled = 2**-20 * offset if quantity == "hidden gradient" else 0.0
            assert mine <= 2 * eager + 1e-5 + cancelled, (rank, quantity)


@pytest.mark.parametrize("tile", [1024, 5])
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_all_reduces_however_many_tiles(monkeypatch, backend, tile):
    operations = []

    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None):
        operations.append((op, group, tuple(tensor.shape)))

    monkeypatch.setattr(vocab_parallel.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(head_module, "TILE_ROWS", tile)
    monkeypatch.setattr(head_module, "TILE_COLUMNS", tile)
    hidden_TH, weight_VH = torch.randn(20, 4, requires_grad=True), torch.randn(33, 4)
    logprob_T, entropy_T = linear_logprob(
        hidden_TH,
        weight_VH,
        torch.arange(20),
        shard=VocabShard(0, 33, 40, "the group"),
        backend=backend,
        return_entropy=True,
    )
    forward = [(dist.ReduceOp.MAX, "the group", (20,)), (dist.ReduceOp.SUM, "the group", (3, 20))]
    assert operations == forward
    (logprob_T + entropy_T).sum().backward()
    assert operations == forward


@pytest.mark.parametrize(("start", "stop", "total"), [(5, 3, 9), (-1, 3, 9), (0, 3, 0)])
def test_impossible_shards_are_refused(start, stop, total):
    with pytest.raises(ValueError, match="0 <= start <= stop and total >= 1"):
        VocabShard(start, stop, total)


def test_padding_is_no_column():
    counts = [
        (s.num_rows, s.num_columns)
        for s in (VocabShard.whole(7), VocabShard(4, 8, 6), VocabShard(8, 12, 6))
    ]
    assert counts == [(7, 7), (4, 2), (4, 0)]
