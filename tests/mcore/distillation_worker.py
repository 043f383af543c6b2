"""What every rank of the tests of distillation runs: one world, one layout after another."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mcore.views_worker import (
    CP2,
    PP2,
    SP,
    TEACHER,
    TEMPERATURE,
    TP2,
    VPP2,
    Case,
    build,
    make_views,
    start,
)
from torch import Tensor

from megatron_credit.mcore import cpu_mode

KINDS: dict[str, tuple[bool, dict[str, Any]]] = {
    "jsd": (False, {}),
    "uneven_teacher": (True, {"beta": 0.3}),
    "forward": (True, {"beta": 0.0}),
    "reverse": (False, {"beta": 1.0}),
    "top_k": (True, {"beta": 0.5, "top_k": 20}),
    "top_k_own": (False, {"beta": 0.0, "top_k": 5}),
}
"""By name: whether the teacher has other weights and a pass of its own, and the divergence."""

CASES: dict[int, dict[str, Case]] = {
    1: {
        "one": Case(),
        # The other extremes of packing: every rollout alone, and everything in one micro-batch.
        "alone": Case(bound=1),
        "together": Case(bound=10_000),
    },
    2: {
        "tp2": Case(TP2),
        "tp2_sp": Case(TP2 | SP),
        "pp2": Case(PP2),
        "pp2_vpp2": Case(PP2 | VPP2),
        "cp2": Case(CP2),
        "cp2_alone": Case(CP2, bound=1),
        "dp2": Case(),
    },
    4: {
        "tp2_pp2": Case(TP2 | PP2),
        "tp2_sp_cp2": Case(TP2 | SP | CP2),
    },
}


def run(rank: int, world_size: int, rendezvous: str, directory: str) -> None:
    """Runs every case of this world size; rank 0 writes `<case>.pt`."""
    torch.set_num_threads(1)
    cpu_mode.enable()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}-{world_size}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),
    )
    for name, case in CASES[world_size].items():
        result = run_case(case, Path(directory))
        if rank == 0:
            torch.save(result, Path(directory, f"{name}.pt"))
    if world_size == 1:
        torch.save(refusals(Path(directory)), Path(directory, "refusals.pt"))
    dist.destroy_process_group()


def run_case(case: Case, directory: Path) -> dict[str, dict[str, Any]]:
    """Divergences of every kind, with their gradients."""
    from megatron_credit.mcore.parallel import stop_parallel

    ranks = start(case)
    teacher = build(replace(case, model=TEACHER), directory, ranks).chunks
    result = {}
    for name, (by_teacher, options) in KINDS.items():
        # Each step moves the weights.
        policy = build(case, directory, ranks)
        result[name] = distilled(policy, options, teacher=teacher if by_teacher else None)
    stop_parallel(keep_world=True)
    return result


def head_of(policy: Any, num_contexts: int, options: dict[str, Any]) -> Any:
    """The head that a pass trains through."""
    from megatron_credit.mcore.comparison import Comparison
    from megatron_credit.mcore.distillation_head import DistillationHead

    output, cp_group = policy.batching.head(TEMPERATURE), policy.ranks.cp_group
    return DistillationHead(output, Comparison(num_contexts), cp_group, **options)


def distilled(policy: Any, options: dict[str, Any], *, teacher: Any) -> dict[str, Any]:
    """Log-prob, entropy and divergence of every response token, and the gradient of `mixture`."""
    from megatron_credit.mcore.forward import run_schedule
    from megatron_credit.mcore.scoring import TokenValues
    from megatron_credit.mcore.teacher_pass import read_teachers

    views = make_views(policy.architecture.vocab_size)
    packer = policy.batching.view_packer(views, [1.0] * len(views))
    head = head_of(policy, views[0].num_contexts, options)
    batches = policy.batching.batches(packer)
    if teacher is not None:
        pairs = policy.batching.batches_apart(packer)
        batches = read_teachers(teacher, pairs, head.output, head.cp_group)
    values = TokenValues(3, packer.slots[-1], policy.device)

    def loss(batch: Any, *found: Tensor) -> tuple[Tensor, None]:
        values.keep(batch, torch.stack(found).detach())
        return mixture(*found), None

    before = {name: tensor.clone() for name, tensor in policy.weights()}
    policy.optimizer.zero_grad()
    run_schedule(policy.wrapped, batches, head, loss, forward_only=False)
    policy.optimizer.step()
    taken = {name: before[name] - tensor for name, tensor in policy.weights()}
    return {"values": values.gather(policy.ranks), "gradients": taken}


def mixture(logprob_T: Tensor, entropy_T: Tensor, divergence_T: Tensor) -> Tensor:
    """A loss in which each part counts, and each token."""
    return 0.02 * (0.1 * logprob_T + 0.3 * entropy_T + 10 * divergence_T).sum()


def refusals(directory: Path) -> dict[str, str]:
    """What is said of divergences that cannot be."""
    from megatron_credit.mcore.parallel import stop_parallel

    policy = build(Case(), directory, start(Case()))
    said = {}
    for name, options in {"beta": {"beta": 2.0}, "top_k": {"top_k": 0}}.items():
        try:
            head_of(policy, 2, options)
        except ValueError as error:
            said[name] = str(error)
    stop_parallel(keep_world=True)
    return said
