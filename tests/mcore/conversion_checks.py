"""What the processes of the conversion tests run: checkpoints under several layouts, and back."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mcore.parity_worker import OBJECTIVE, TEMPERATURE, make_batch

from megatron_credit.mcore import cpu_mode
from megatron_credit.mcore.config import OptimizerConfig, ParallelConfig, PolicyConfig
from megatron_credit.mcore.world import join_world

WORLD_SIZE = 2
LAYOUTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "tp2": ("qwen3_odd_vocab", {"tensor": 2}, "fp32"),
    "pp2": ("qwen3_tied", {"pipeline": 2}, "fp32"),
    "pp2_vpp2": ("qwen3_odd_vocab", {"pipeline": 2, "virtual_pipeline": 2}, "fp32"),
    "ep2": ("qwen3_moe", {"expert": 2}, "fp32"),
    "dp2_bf16": ("qwen2_bias", {}, "bf16"),
}
"""Model, layout (data ranks split Adam's state) and type of a run that leaves a checkpoint."""


def build(model: Path, parallel: dict[str, Any], dtype: str) -> Any:
    """A policy of the directory, far enough from nothing to be moved by a step."""
    from megatron_credit.mcore.parallel import start_parallel
    from megatron_credit.mcore.policy import Policy

    layout = ParallelConfig(**parallel)
    return Policy.build(
        policy=PolicyConfig(model=model, dtype=dtype, tokens_per_microbatch=64),
        optimizer=OptimizerConfig(lr=1e-2),
        parallel=layout,
        ranks=start_parallel(layout, seed=1, timeout_s=120),
        seed=1,
    )


def train(rank: int, directory: str) -> None:
    """One step from each model under its layout: its checkpoint, and the weights exported live."""
    torch.set_num_threads(1)
    cpu_mode.enable()
    from megatron_credit.mcore.parallel import stop_parallel

    root = Path(directory)
    join_world(rank=rank, size=WORLD_SIZE, rendezvous=root / "train", timeout_s=120)
    for name, (kind, parallel, dtype) in LAYOUTS.items():
        policy = build(root / kind, parallel, dtype)
        batch = make_batch("mixed", policy.architecture.vocab_size)
        policy.update(batch, objective=OBJECTIVE, temperature=TEMPERATURE)
        policy.save(root / name / "step-000001")
        scored = policy.score(batch, temperature=1.0)
        weights = {key: tensor.clone() for key, tensor in policy.weights()}
        if rank == 0:
            logprobs = [one.logprob_T for one in scored]
            torch.save({"weights": weights, "logprobs": logprobs}, root / f"{name}.pt")
        stop_parallel(keep_world=True)
    dist.destroy_process_group()


def resume(rank: int, directory: str) -> None:
    """Two steps from the converted checkpoint and from the model itself; rank 0 says how far apart
    they are."""
    torch.set_num_threads(1)
    cpu_mode.enable()
    from megatron_credit.mcore.parallel import stop_parallel

    root = Path(directory)
    join_world(rank=rank, size=WORLD_SIZE, rendezvous=root / "resume", timeout_s=120)
    results: dict[str, Any] = {}
    for name in ("fresh", "converted"):
        policy = build(root / "qwen3_odd_vocab", {"tensor": 2}, "fp32")
        batch = make_batch("mixed", policy.architecture.vocab_size)
        if name == "converted":
            # Away from the start first, so that nothing is right by chance.
            policy.update(batch, objective=OBJECTIVE, temperature=TEMPERATURE)
            policy.load(root / "converted" / "step-000000")
        results[name] = [
            policy.update(batch, objective=OBJECTIVE, temperature=TEMPERATURE).metrics
            for _ in range(2)
        ]
        results[name].append({key: tensor.sum().item() for key, tensor in policy.weights()})
        stop_parallel(keep_world=True)
    if rank == 0:
        (root / "resume.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def export_all(directory: Path) -> None:
    """Exports every checkpoint from one process."""
    cpu_mode.enable()
    from megatron_credit.mcore import conversion_worker

    for name, (kind, _, _) in LAYOUTS.items():
        conversion_worker.to_hf(
            directory / name / "step-000001",
            directory / kind,
            directory / f"{name}-hf",
            dtype="auto",
        )
