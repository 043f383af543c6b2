"""What both ranks of the checkpoint tests run: save under one layout, load under others."""

import json
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mcore.parity_worker import OBJECTIVE, TEMPERATURE, Case, build, make_batch
from torch import Tensor

from megatron_credit.mcore import cpu_mode
from megatron_credit.mcore.config import OptimizerConfig, TeacherConfig

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
    "tp2": Route(TP2, {"same": TP2, "pp2": PP2, "dp2": DP2, "dp2_whole": DP2_WHOLE}),
    # A tied embedding has a gradient bucket of its own on the last stage.
    "pp2": Route(PP2, {"same": PP2, "tp2": TP2}, averaged=True),
    "dp2": Route(DP2, {"same": DP2, "tp2": TP2}),
    "dp2_whole": Route(DP2_WHOLE, {"same": DP2_WHOLE, "pp2": PP2}),
    # The padded vocabulary of two tensor ranks is longer than that of one.
    "odd_tp2": Route(ODD_TP2, {"same": ODD_TP2, "pp2": ODD_PP2, "interleaved": INTERLEAVED}),
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
    "sgd": Route(TP2, {"same": TP2, "pp2": PP2}, SGD),
}


def run(rank: int, rendezvous: str, directory: str) -> None:
    """Runs every route and every refusal; rank 0 writes `results.pt`."""
    torch.set_num_threads(1)
    cpu_mode.enable()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=120),
    )
    root = Path(directory)
    results = {name: run_route(root / name, route) for name, route in ROUTES.items()}
    refused = refusals(root)
    if rank == 0:
        torch.save(results, root / "results.pt")
        (root / "refused.json").write_text(json.dumps(refused))
    dist.destroy_process_group()


def run_route(path: Path, route: Route) -> dict[str, Any]:
    """What the steps after a checkpoint do: in the run that wrote it, and in those that load it."""
    from megatron_credit.mcore.parallel import stop_parallel

    policy = begin(route.source, route)
    batch = make_batch("mixed", policy.architecture.vocab_size)
    for _ in range(2):
        policy.update(batch, objective=OBJECTIVE, temperature=TEMPERATURE)
    weights = parameters(policy)
    start = time.perf_counter()
    policy.save(path)
    seconds = time.perf_counter() - start
    results = {"went_on": follow(policy, batch), "save_s": seconds, "weights": weights}
    stop_parallel(keep_world=True)
    for name, case in route.targets.items():
        policy = begin(case, route)
        # A step away from where both started, so that nothing is right by chance.
        policy.update(batch, objective=OBJECTIVE, temperature=TEMPERATURE)
        policy.load(path)
        results[name] = {"loaded": parameters(policy), **follow(policy, batch)}
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
    gathered: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(gathered, found)
    return {name: tensor for part in gathered for name, tensor in part.items()}


class Bomb:
    """Unpickling it would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Callable, tuple[str, str]]:
        return (open, (self.path, "w"))


def refusals(root: Path) -> dict[str, str]:
    """The message of each refusal; and that loading left the policy as it was."""
    from megatron_credit.mcore.parallel import stop_parallel

    policy = build(TP2, ADAM)
    before = parameters(policy)
    messages = {}
    for name in ("missing_file", "altered", "cut_manifest", "absent", "bomb"):
        damaged = root / f"damaged_{name}"
        if dist.get_rank() == 0:
            damage(root, root / "tp2", damaged, name)
        dist.barrier()
        messages[name] = refusal(lambda path=damaged: policy.load(path))
    messages["other_model"] = refusal(lambda: policy.load(root / "odd_tp2"))
    messages["other_dtype"] = refusal(lambda: policy.load(root / "bf16"))
    messages["other_optimizer"] = refusal(lambda: policy.load(root / "sgd"))
    messages["exists"] = refusal(lambda: policy.save(root / "tp2"))
    after = parameters(policy)
    messages["changed"] = str(
        [name for name in before if not torch.equal(before[name], after[name])]
    )
    stop_parallel(keep_world=True)
    return messages


def refusal(action: Callable[[], None]) -> str:
    try:
        action()
    except ValueError as error:
        return str(error)
    return "accepted"


def damage(root: Path, source: Path, target: Path, kind: str) -> None:
    """A copy of the checkpoint with one thing wrong."""
    import shutil
    import zlib

    if kind == "absent":
        return
    shutil.copytree(source, target)
    data = sorted(target.glob("*.distcp"))[0]
    if kind == "missing_file":
        data.unlink()
    elif kind == "altered":
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    elif kind == "cut_manifest":
        text = (target / "manifest.json").read_text()
        (target / "manifest.json").write_text(text[: len(text) // 2])
    else:
        content = pickle.dumps(Bomb(root / "exploded"))
        (target / ".metadata").write_bytes(content)
        manifest = json.loads((target / "manifest.json").read_text())
        digest = f"{len(content)} bytes, crc32 {zlib.crc32(content):08x}"
        manifest["files"][".metadata"] = digest
        (target / "manifest.json").write_text(json.dumps(manifest))
