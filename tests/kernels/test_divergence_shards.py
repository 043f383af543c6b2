"""divergence_loss over Gloo shards of unequal size equals one rank, values and gradients."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from credit_kernels import VocabShard, divergence_loss, vocab_parallel
from credit_kernels.divergence import events as events_module
from credit_kernels.divergence.cases import CASES
from credit_kernels.evidence import views as views_module

NAMED = {case.name: case for case in CASES}
WORLD = 3
# Unequal cuts, an empty shard and shards that are all padding, for groups of 2 and of 3 ranks.
CUTS = {
    2: {
        "small": (0, 17, 50),
        "forward": (0, 90, 97),
        "reverse": (0, 31, 97),
        "capped": (0, 88, 97),
        "many_tiles": (0, 1001, 1203),
        "top_k": (0, 88, 97),
        "sure_top_k": (0, 3, 97),
        "all_but_one": (0, 90, 97),
    },
    3: {
        "small": (0, 17, 17, 50),
        "forward": (0, 10, 90, 97),
        "reverse": (0, 31, 93, 97),
        "uneven": (0, 50, 93, 97),
        "far_below_zero": (0, 1, 60, 97),
        "far_above_zero": (0, 333, 600, 700),
        "no_row": (0, 2, 4, 5),
        "no_row_top_k": (0, 2, 4, 5),
        "one_column": (0, 0, 1, 1),
        "all_ignored": (0, 3, 7, 7),
        "top_k": (0, 3, 60, 97),
        "top_1": (0, 31, 93, 97),
        "top_k_forward": (0, 0, 80, 97),
        "top_k_reverse": (0, 40, 50, 97),
        "all_but_one": (0, 31, 93, 97),
        "many_tiles_top_k": (0, 30, 1003, 1203),
    },
}
PROBLEMS = [(size, name) for size, cuts in CUTS.items() for name in cuts]
TOTAL, ROWS = 40, 43
TIED = {2: (0, 3, ROWS), 3: (0, 11, 41, ROWS)}


def mixture(divergence_T):
    return (torch.linspace(-1, 2, len(divergence_T), dtype=divergence_T.dtype) * divergence_T).sum()


def evaluate(function, hidden_TH, weight_VH):
    """Divergences, and the gradients of a mixture of them."""
    inputs = [value.detach().clone().requires_grad_() for value in (hidden_TH, weight_VH)]
    divergence_T = function(*inputs)
    return [divergence_T, *torch.autograd.grad(mixture(divergence_T), inputs)]


def largest(difference):
    return difference.abs().max().item() if difference.numel() else 0.0


def sharded(function, cut, rank, group, hidden_TH, weight_VH, teacher_VH, total):
    """This rank's values, with the gradient of hidden summed over the group."""
    part = slice(cut[rank], cut[rank + 1])
    shard = VocabShard(part.start, part.stop, total, group)
    teacher_VH = None if teacher_VH is None else teacher_VH[part]
    values = evaluate(lambda h, w: function(h, w, teacher_VH, shard), hidden_TH, weight_VH[part])
    dist.all_reduce(values[1], group=group)
    return values, part


def errors(case, cut, rank, group, dtype):
    """For each quantity, the error of the shards and that of eager torch on one rank."""
    hidden_TH, weight_VH, target_T = case.draw(dtype)
    teacher_TH, teacher_VH = case.teacher(hidden_TH, weight_VH)

    def by_us(hidden_TH, weight_VH, teacher_VH, shard):
        return case.compute_on(hidden_TH, teacher_TH, weight_VH, target_T, teacher_VH, shard)[0]

    def plain(hidden_TH, weight_VH):
        return case.plain(hidden_TH, weight_VH, target_T)[0]

    truth = evaluate(plain, hidden_TH.double(), weight_VH.double())
    eager = evaluate(plain, hidden_TH, weight_VH)
    theirs = [largest(a - b) for a, b in zip(eager, truth, strict=True)]
    mine, part = sharded(by_us, cut, rank, group, hidden_TH, weight_VH, teacher_VH, case.total)
    truth[2] = truth[2][part]
    return [(largest(a - b), e) for a, b, e in zip(mine, truth, theirs, strict=True)]


def tied():
    """Logits that are whole numbers, many of them equal, and teachers that tell those apart."""
    generator = torch.Generator().manual_seed(9)
    hidden_TH = torch.randint(-1, 2, (12, 2), generator=generator).double()
    teacher_TH = torch.randn(12, 2, generator=generator).double()
    weight_VH = torch.randint(-2, 3, (ROWS, 2), generator=generator).double()
    teacher_VH = torch.randn(ROWS, 2, generator=generator).double()
    hidden_TH[0] = 0
    return hidden_TH, teacher_TH, weight_VH, teacher_VH, torch.arange(12)


def tied_gaps(cut, rank, group):
    """How far shards are from one rank where many tokens are equally likely."""
    hidden_TH, teacher_TH, weight_VH, teacher_VH, target_T = tied()

    def by_us(hidden_TH, weight_VH, teacher_VH, shard):
        return divergence_loss(
            hidden_TH, teacher_TH, weight_VH, target_T, top_k=4, shard=shard,
            teacher_weight_VH=teacher_VH,
        )  # fmt: skip

    whole_shard = VocabShard(0, ROWS, TOTAL)
    whole = evaluate(lambda h, w: by_us(h, w, teacher_VH, whole_shard), hidden_TH, weight_VH)
    mine, part = sharded(by_us, cut, rank, group, hidden_TH, weight_VH, teacher_VH, TOTAL)
    whole[2] = whole[2][part]
    return [largest(a - b) for a, b in zip(mine, whole, strict=True)]


def shard_worker(rank, directory):
    torch.set_num_threads(1)
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    groups = {size: dist.new_group(list(range(size))) for size in CUTS}
    events_module.SENT_NUMBERS = 500  # several all-gathers
    found = {
        (size, name, dtype): errors(NAMED[name], CUTS[size][name], rank, groups[size], dtype)
        for size, name in PROBLEMS
        for dtype in (torch.float32, torch.float64)
        if rank < size
    }
    gaps = {size: tied_gaps(cut, rank, groups[size]) for size, cut in TIED.items() if rank < size}
    torch.save((found, gaps), directory / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Of each rank, (size, name, type) -> pairs of errors, and gaps; one set of processes."""
    directory = tmp_path_factory.mktemp("shards")
    mp.start_processes(shard_worker, (directory,), nprocs=WORLD, start_method="spawn")
    return [torch.load(directory / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize(("size", "name"), PROBLEMS)
def test_unequal_shards_equal_one_rank(found, size, name):
    offset = abs(NAMED[name].offset)
    for errors_of, _ in found[:size]:
        for index, (mine, eager) in enumerate(errors_of[size, name, torch.float32]):
            # Parts as large as the offset cancel in the sum over the shards: 16 roundings of them.
            cancelled = 2**-20 * offset if index == 1 else 0.0
            assert mine <= 2 * eager + 1e-5 + cancelled, index
        assert max(mine for mine, _ in errors_of[size, name, torch.float64]) < 1e-9


@pytest.mark.parametrize("size", TIED)
def test_equal_tokens_are_told_apart_by_id_whichever_rank_has_them(found, size):
    assert max(gap for _, gaps in found[:size] for gap in gaps[size]) < 1e-12


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"beta": 0.0}, ["max", "sum"]),
        ({"beta": 1.0}, ["max", "sum"]),
        ({"beta": 0.5}, ["max", "sum", "gather"]),
        ({"beta": 0.5, "top_k": 3}, ["gather"]),
    ],
)
def test_collectives_however_many_blocks(monkeypatch, options, expected):
    operations = []

    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None):
        operations.append("max" if op == dist.ReduceOp.MAX else "sum")

    def all_gather(parts, tensor, group=None):
        operations.append("gather")
        parts[0].copy_(tensor)

    monkeypatch.setattr(vocab_parallel.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(vocab_parallel.dist, "all_gather", all_gather)
    monkeypatch.setattr(vocab_parallel.dist, "get_world_size", lambda group: 1)
    monkeypatch.setattr(views_module, "HELD_LOGITS", 200)
    hidden_TH, teacher_TH = torch.randn(2, 20, 4)
    inputs = hidden_TH.requires_grad_(), teacher_TH, torch.randn(33, 4), torch.arange(20)
    shard = VocabShard(0, 33, 40, "the group")
    divergence_loss(*inputs, shard=shard, **options).sum().backward()
    assert operations == expected
