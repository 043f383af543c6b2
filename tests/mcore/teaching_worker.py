"""What every rank of the tests of teaching runs: one world, one layout after another."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mcore import teaching_cases as cases
from mcore import teaching_checks
from mcore.teaching_cases import CASES, KINDS, Case

from megatron_credit.mcore import cpu_mode
from megatron_credit.mcore.config import TeacherConfig


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
    checks = teaching_checks.alone if world_size == 1 else teaching_checks.resumed
    found = checks(Path(directory))
    if rank == 0:
        torch.save(found, Path(directory, f"checks-{world_size}.pt"))
    dist.destroy_process_group()


def run_case(case: Case, directory: Path) -> dict[str, Any]:
    """Of each kind of teaching, metrics on all ranks and gradients; and what averages become."""
    views = cases.make_views()
    result: dict[str, Any] = {}
    for kind in KINDS:
        policy = cases.build(case, directory)
        if kind == "distillation":
            policy.add_teacher(TeacherConfig(kind="frozen", model=directory / cases.TEACHER))
        before = cases.exported(policy.converter)
        update = cases.learn(policy, views, kind)
        taken = {name: before[name] - tensor for name, tensor in policy.weights()}
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, update.metrics)
        scored = [vars(one) for one in update.scored]
        result[kind] = {"all_metrics": gathered, "gradients": taken, "scored": scored}
        cases.stop()
    policy = cases.build(case, directory, lr=0.05)
    policy.add_teacher(TeacherConfig(kind="ema", decay=cases.DECAY))
    for kind in ("evidence", "distillation"):
        cases.learn(policy, views, kind)
    result["average"] = cases.averages(policy)
    cases.stop()
    return result
