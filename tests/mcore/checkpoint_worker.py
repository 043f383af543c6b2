"""What both ranks of the checkpoint tests run: save under one layout, load under others."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mcore import save_checks
from mcore.damaged import DAMAGES, damage
from mcore.parity_worker import OBJECTIVE, TEMPERATURE, Case, build, make_batch
from torch import Tensor

from megatron_credit.mcore import cpu_mode
from megatron_credit.mcore.config import OptimizerConfig, TeacherConfig
from megatron_credit.mcore.world import join_world

WORLD_SIZE = 2
# A large eps keeps Adam from blowing the rounding of tiny gradients up to whole steps.
ADAM = OptimizerConfig(lr=1e-2, eps=1e-3, warmup_steps=4, weight_decay=0.1)
SGD = OptimizerConfig(kind="sgd", lr=1e-2)


@dataclass(frozen=True)
class Route:
    """A checkpoint's layout and those that it is loaded under; the first is the same again."""

    source: Case
    targets: dict[str, Case]
    optimizer: OptimizerConfig = ADAM
    averaged: bool = False
    """A teacher follows the policy; its average counts among the parameters."""


TP2, PP2 = Case("tied", {"tensor": 2}), Case("tied", {"pipeline": 2})
DP2, DP2_WHOLE = Case("tied"), Case("tied", {"distributed_optimizer": False})
ODD_TP2, ODD_PP2 = Case("odd", {"tensor": 2}), Case("odd", {"pipeline": 2})
EP2, ETP2, MOE_DP2 = (
    Case("moe", {"expert": 2}),
    Case("moe", {"expert_tensor": 2}),
    Case("moe"),
)
MOE_PP2 = Case("moe", {"pipeline": 2})
MOE_TP2 = Case("moe", {"tensor": 2, "sequence_parallel": True})
INTERLEAVED = Case("odd", {"pipeline": 2, "virtual_pipeline": 2})
BF16_TP2, BF16_DP2 = replace(TP2, dtype="bf16"), replace(DP2, dtype="bf16")
BF16_WHOLE = replace(DP2_WHOLE, dtype="bf16")
ROUTES = {
    "tp2": Route(TP2, {"same": TP2, "pp2": PP2, "dp2": DP2, "dp2_whole": DP2_WHOLE}, averaged=True),
    # A tied embedding has a gradient bucket of its own on the last stage.
    "pp2": Route(PP2, {"same": PP2, "tp2": TP2}, averaged=True),
    "dp2": Route(DP2, {"same": DP2, "tp2": TP2, "pp2": PP2}, averaged=True),
    "dp2_whole": Route(DP2_WHOLE, {"same": DP2_WHOLE, "pp2": PP2}),
    # The padded vocabulary of two tensor ranks is longer than that of one.
    "odd_tp2": Route(ODD_TP2, {"same": ODD_TP2, "pp2": ODD_PP2, "interleaved": INTERLEAVED}),
    "interleaved": Route(INTERLEAVED, {"same": INTERLEAVED, "odd_tp2": ODD_TP2}, averaged=True),
    "odd_pp2": Route(ODD_PP2, {"same": ODD_PP2, "tp2": ODD_TP2}),
    "ep2": Route(
        EP2,
        {"same": EP2, "dp2": MOE_DP2, "pp2": MOE_PP2, "tp2": MOE_TP2, "etp2": ETP2},
        averaged=True,
    ),
    "etp2": Route(ETP2, {"same": ETP2, "ep2": EP2}),
    "bf16": Route(
        BF16_TP2, {"same": BF16_TP2, "dp2": BF16_DP2, "dp2_whole": BF16_WHOLE}, averaged=True
    ),
    "plain": Route(TP2, {"same": TP2}),
    "plain_bf16": Route(BF16_TP2, {"same": BF16_TP2}),
    "sgd": Route(TP2, {"same": TP2, "pp2": PP2}, SGD),
}


ALONE, MOE_ALONE = Case("tied"), Case("moe")
TO_ONE = {"tp2": ALONE, "pp2": ALONE, "dp2": ALONE, "dp2_whole": ALONE, "ep2": MOE_ALONE}
"""Checkpoints of two ranks that one rank alone goes on from, under "one"."""
FROM_ONE = Route(ALONE, {"same": ALONE, "tp2": TP2, "pp2": PP2, "dp2": DP2}, averaged=True)
"""A checkpoint of one rank; all but the first of its targets are of two ranks."""


def run(rank: int, directory: str) -> None:
    """Runs every route and every refusal; rank 0 writes `results.pt`."""
    torch.set_num_threads(1)
    cpu_mode.enable()
    root = Path(directory)
    join(rank, root / "both")
    results = {name: run_route(root / name, route) for name, route in ROUTES.items()}
    refused = refusals(root)
    saves = with_policy(lambda policy: save_checks.run(root, policy))
    dist.destroy_process_group()
    if rank == 0:
        join_world(rank=0, size=1, rendezvous=None, timeout_s=120)
        for name, case in TO_ONE.items():
            results[name]["one"] = go_on(root / name, ROUTES[name], case)
        same = {"same": FROM_ONE.targets["same"]}
        results["one"] = run_route(root / "one", replace(FROM_ONE, targets=same))
        dist.destroy_process_group()
    join(rank, root / "again")
    of_two = [(name, case) for name, case in FROM_ONE.targets.items() if name != "same"]
    found = {name: go_on(root / "one", FROM_ONE, case) for name, case in of_two}
    if rank == 0:
        results["one"] |= found
        torch.save(results, root / "results.pt")
        (root / "found.json").write_text(json.dumps({"refused": refused, "saves": saves}))
    dist.destroy_process_group()


def join(rank: int, rendezvous: Path) -> None:
    join_world(rank=rank, size=WORLD_SIZE, rendezvous=rendezvous, timeout_s=120)


def run_route(path: Path, route: Route) -> dict[str, Any]:
    """What the steps after a checkpoint do: in the run that wrote it, and in those that load it.

    The same state is written twice, the second time while those steps are taken.
    """
    from megatron_credit.mcore.parallel import stop_parallel

    policy = begin(route.source, route)
    batch = make_batch("mixed", policy.architecture.vocab_size)
    for _ in range(2):
        policy.update(batch, objective=OBJECTIVE, temperature=TEMPERATURE)
    weights = parameters(policy)
    policy.save(path)
    with save_checks.held_back() as gate:
        save_checks.save(policy, path.with_name(f"{path.name}_meanwhile"))
        before = random_states()
        results = {"went_on": follow(policy, batch), "weights": weights}
        results["drew"] = random_states() != before
        gate.set()
        policy.saver.finish()
    stop_parallel(keep_world=True)
    return results | {name: go_on(path, route, case) for name, case in route.targets.items()}


def random_states() -> list[str]:
    """Every state that a step could draw from."""
    import random

    import numpy as np
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracked = get_cuda_rng_tracker().get_states()
    states = [torch.get_rng_state(), *(tracked[name] for name in sorted(tracked))]
    return [repr(random.getstate()), repr(np.random.get_state()), *map(repr_of, states)]


def repr_of(state: Tensor) -> str:
    return state.numpy().tobytes().hex()


def go_on(path: Path, route: Route, case: Case) -> dict[str, Any]:
    """The weights that a layout loads, and the steps after that."""
    from megatron_credit.mcore.parallel import stop_parallel

    policy = begin(case, route)
    batch = make_batch("mixed", policy.architecture.vocab_size)
    # A step away from where both started, so that nothing is right by chance.
    policy.update(batch, objective=OBJECTIVE, temperature=TEMPERATURE)
    policy.load(path)
    results = {"loaded": parameters(policy), **follow(policy, batch)}
    stop_parallel(keep_world=True)
    return results


def begin(case: Case, route: Route) -> Any:
    """A policy at its first step, with its teacher."""
    policy = build(case, route.optimizer)
    policy.add_teacher(TeacherConfig(kind="ema" if route.averaged else "current", decay=0.5))
    return policy


def follow(policy: Any, batch: list[Any]) -> dict[str, Any]:
    """Two more steps: their metrics, and the weights afterwards."""
    metrics = [
        policy.update(batch, objective=OBJECTIVE, temperature=TEMPERATURE).metrics for _ in range(2)
    ]
    return {"metrics": metrics, "after": parameters(policy), "steps": policy.optimizer.num_steps}


def parameters(policy: Any) -> dict[str, Tensor]:
    """Full parameters by global name, gathered over all ranks."""
    from megatron_credit.mcore import sharding
    from megatron_credit.mcore.names import global_name, is_vocabulary

    def joined(shard: Tensor, name: str, local_name: str) -> Tensor:
        _, size, group = policy.ranks.splitting(name)
        shards = [torch.empty_like(shard) for _ in range(size)]
        dist.all_gather(shards, shard, group=group)
        full = sharding.join_shards(shards, local_name).clone()
        rows = policy.architecture.vocab_size if is_vocabulary(name) else full.shape[0]
        return full[:rows]

    found = {}
    teacher = policy.teacher_model
    averages = {} if teacher is None else {one.source: one.value for one in teacher.averages}
    for chunk in policy.chunks:
        for local_name, parameter in chunk.named_parameters():
            name = global_name(policy.architecture, chunk, local_name)
            found[name] = joined(parameter.detach(), name, local_name)
            if parameter in averages:
                found[f"average {name}"] = joined(averages[parameter], name, local_name)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    return {name: tensor for part in gathered for name, tensor in part.items()}


def with_policy(action: Callable[[Any], Any]) -> Any:
    """What it finds of a policy on two tensor ranks."""
    from megatron_credit.mcore.parallel import stop_parallel

    found = action(build(TP2, ADAM))
    stop_parallel(keep_world=True)
    return found


def refusals(root: Path) -> dict[str, str]:
    """The message of each refusal; and that loading left the policy as it was."""
    return with_policy(lambda policy: refused_by(policy, root))


def refused_by(policy: Any, root: Path) -> dict[str, str]:
    before = parameters(policy)
    messages = {}
    for kind in DAMAGES:
        copy = root / f"damaged_{kind}"
        if dist.get_rank() == 0:
            shutil.copytree(root / "plain", copy)
            damage(copy, kind)
        dist.barrier()
        messages[kind] = refusal(lambda path=copy: policy.load(path))
    messages["absent"] = refusal(lambda: policy.load(root / "absent"))
    messages["other_model"] = refusal(lambda: policy.load(root / "odd_tp2"))
    messages["other_dtype"] = refusal(lambda: policy.load(root / "plain_bf16"))
    messages["other_optimizer"] = refusal(lambda: policy.load(root / "sgd"))
    messages["other_teacher"] = refusal(lambda: policy.load(root / "tp2"))
    messages["exists"] = refusal(lambda: policy.save(root / "tp2"))
    after = parameters(policy)
    messages["changed"] = str(
        [name for name in before if not torch.equal(before[name], after[name])]
    )
    return messages


def refusal(action: Callable[[], None]) -> str:
    try:
        action()
    except ValueError as error:
        return str(error)
    return "accepted"
