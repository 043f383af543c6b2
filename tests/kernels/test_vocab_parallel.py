"""linear_logprob over Gloo shards of unequal size equals one rank, in values and gradients."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from credit_kernels import VocabShard, linear_logprob
from credit_kernels.logprob.cases import CASES

# Unequal cuts, an empty shard and one that is all padding.
CUTS = {
    2: {
        "small": (0, 17, 50),
        "padded": (0, 600, 640),
        "capped": (0, 90, 97),
        "all_ignored": (0, 3, 7),
    },
    3: {
        "small": (0, 17, 17, 50),
        "padded": (0, 100, 520, 640),
        "far_below_zero": (0, 1, 60, 97),
        "far_above_zero": (0, 333, 600, 700),
        "no_row": (0, 2, 4, 5),
    },
}


OFFSETS = {case.name: abs(case.offset) for case in CASES}


def mixture(logprob_T, entropy_T):
    generator = torch.Generator().manual_seed(3)
    weight_T = torch.randn(len(logprob_T), generator=generator)
    return (weight_T * logprob_T + 0.3 * weight_T.flip(0) * entropy_T).sum()


def gradients(case, shard, weight_VH, hidden_TH, target_T):
    hidden_TH = hidden_TH.clone().requires_grad_()
    weight_VH = weight_VH.clone().requires_grad_()
    outputs = linear_logprob(
        hidden_TH,
        weight_VH,
        target_T,
        shard=shard,
        temperature=case.temperature,
        softcap=case.softcap,
        return_entropy=True,
    )
    return [*outputs, *torch.autograd.grad(mixture(*outputs), (hidden_TH, weight_VH))]


def largest_difference(a, b):
    return (a - b).abs().max().item() if a.numel() else 0.0


def shard_worker(rank, world, store, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    cases = {case.name: case for case in CASES}
    for name, cut in CUTS[world].items():
        case = cases[name]
        hidden_TH, weight_VH, target_T = case.draw(torch.float32)
        alone = VocabShard(0, case.rows, case.total)
        whole = gradients(case, alone, weight_VH, hidden_TH, target_T)
        part = slice(cut[rank], cut[rank + 1])
        shard = VocabShard(part.start, part.stop, case.total, dist.group.WORLD)
        mine = gradients(case, shard, weight_VH[part], hidden_TH, target_T)
        dist.all_reduce(mine[2])
        expected = [*whole[:3], whole[3][part]]
        gaps = [largest_difference(a, b) for a, b in zip(mine, expected, strict=True)]
        results.put((name, rank, gaps))
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [2, 3])
def test_unequal_shards_equal_one_rank(world, tmp_path):
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    workers = [
        context.Process(target=shard_worker, args=(rank, world, tmp_path / "store", results))
        for rank in range(world)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0] * world
    for _ in range(world * len(CUTS[world])):
        name, rank, gaps = results.get()
        # The gradient of hidden is a difference of numbers as large as the offset.
        assert max(gaps) <= 1e-5 + 2e-6 * OFFSETS[name], (name, rank, gaps)
