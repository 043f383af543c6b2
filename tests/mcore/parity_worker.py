"""What every rank of the parity tests runs: one world, one layout after another."""

import json
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mcore import replay_checks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_credit.batch.sequence import TrainSequence
from megatron_credit.mcore import cpu_mode
from megatron_credit.mcore.architecture import Architecture
from megatron_credit.mcore.config import OptimizerConfig, ParallelConfig, PolicyConfig
from megatron_credit.objective.config import ObjectiveConfig

TEMPERATURE = 0.8
OBJECTIVE = ObjectiveConfig(kl_coef=0.1, normalisation="sequence_mean", importance="truncate")
SIZES = {
    "family": "qwen3",
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_size": 48,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "max_positions": 64,
    "rope_theta": 1e4,
    "norm_eps": 1e-6,
    "qkv_bias": False,
    "qk_norm": True,
}
MODELS = {
    "tied": Architecture(**SIZES, vocab_size=134, tied_embeddings=True),
    # An odd vocabulary: the last tensor rank holds a padding row.
    "odd": Architecture(**SIZES | {"qkv_bias": True}, vocab_size=131, tied_embeddings=False),
    "moe": Architecture(
        **SIZES | {"family": "qwen3_moe"},
        vocab_size=134,
        tied_embeddings=False,
        num_experts=8,
        experts_per_token=4,
        expert_ffn_size=24,
        weights_sum_to_one=True,
    ),
    "wide": Architecture(**SIZES | {"num_layers": 1}, vocab_size=1200, tied_embeddings=False),
}


@dataclass(frozen=True)
class Case:
    """One layout of one model on one batch; the results of equal `model` and `batch` must agree."""

    model: str
    parallel: dict[str, Any] = field(default_factory=dict)
    batch: str = "mixed"
    bound: int = 64
    """Tokens of a micro-batch."""
    dtype: str = "fp32"
    recompute: str = "none"
    replayed: bool = False
    """Most tokens go to experts that the router would not choose."""


EP2, ETP2 = {"expert": 2}, {"expert_tensor": 2}
TP2, PP2, CP2 = {"tensor": 2}, {"pipeline": 2}, {"context": 2}
SP = {"sequence_parallel": True}
VPP2 = {"virtual_pipeline": 2}
CASES: dict[int, dict[str, Case]] = {
    1: {
        "tied": Case("tied"),
        "odd": Case("odd"),
        "moe": Case("moe"),
        "single": Case("tied", batch="single"),
        # The other extremes of packing: every sequence alone, and everything in one micro-batch.
        "alone": Case("tied", bound=1),
        "together": Case("tied", bound=10_000),
        "recompute": Case("tied", recompute="full"),
        "recompute_moe": Case("moe", recompute="full"),
        "replayed_moe": Case("moe", replayed=True),
        "recompute_replayed_moe": Case("moe", recompute="full", replayed=True),
        "bf16": Case("tied", dtype="bf16"),
    },
    2: {
        "tp2": Case("tied", TP2),
        "tp2_odd": Case("odd", TP2),
        "tp2_sp": Case("tied", TP2 | SP),
        "tp2_sp_odd": Case("odd", TP2 | SP),
        "pp2": Case("tied", PP2),
        "pp2_odd": Case("odd", PP2),
        "pp2_vpp2": Case("tied", PP2 | VPP2),
        "cp2": Case("tied", CP2),
        "dp2": Case("tied", {"distributed_optimizer": False}),
        "dp2_distributed": Case("tied"),
        # One sequence for two data ranks: one of them has no valid token.
        "dp2_single": Case("tied", batch="single"),
        "ep2_moe": Case("moe", EP2),
        "ep2_whole_moe": Case("moe", EP2 | {"distributed_optimizer": False}),
        "ep2_alone_moe": Case("moe", EP2, bound=1),
        "pp2_vpp2_moe": Case("moe", PP2 | VPP2),
        "pp2_replayed_moe": Case("moe", PP2, recompute="full", replayed=True),
        "pp2_vpp2_replayed_moe": Case("moe", PP2 | VPP2, recompute="full", replayed=True),
        "cp2_replayed_moe": Case("moe", CP2, replayed=True),
        "tp2_sp_replayed_moe": Case("moe", TP2 | SP, replayed=True),
        "etp2_moe": Case("moe", ETP2),
        "etp2_tp2_sp_moe": Case("moe", TP2 | SP | ETP2),
        "tp2_sp_bf16": Case("tied", TP2 | SP, dtype="bf16"),
    },
    4: {
        "tp2_pp2": Case("tied", TP2 | PP2),
        "tp2_sp_pp2_vpp2_odd": Case("odd", TP2 | SP | PP2 | VPP2),
        "pp2_dp2": Case("tied", PP2),
        "tp2_sp_cp2": Case("tied", TP2 | SP | CP2),
        # The experts of two data ranks, each expert's gradient summed over two replicas.
        "ep2_dp2_moe": Case("moe", EP2),
        "tp2_sp_ep2_moe": Case("moe", TP2 | SP | EP2),
        "ep2_pp2_vpp2_moe": Case("moe", PP2 | VPP2 | EP2),
        "cp2_ep2_moe": Case("moe", CP2 | EP2),
        "etp2_ep2_moe": Case("moe", ETP2 | EP2),
        "tp2_sp_cp2_ep2_replayed_moe": Case("moe", TP2 | SP | CP2 | EP2, replayed=True),
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
        result = run_case(case)
        if rank == 0:
            torch.save(result, Path(directory, f"{name}.pt"))
    if world_size == 2:
        torch.save(shared_payload(), Path(directory, f"payload-{rank}.pt"))
    if world_size == 1:
        torch.save(run_checkpoints(Path(directory)), Path(directory, "hugging_face.pt"))
        Path(directory, "largest.json").write_text(json.dumps(largest_tensor()))
        Path(directory, "skipped.json").write_text(json.dumps(skipped_steps()))
        torch.save(replay_checks.run(Path(directory)), Path(directory, "replay.pt"))
    dist.destroy_process_group()


def make_batch(kind: str, vocab_size: int) -> list[TrainSequence]:
    """Random sequences of many shapes: old log-probs far enough from the policy to be clipped,
    untrained response tokens with NaN values, one response that is empty."""
    generator = torch.Generator().manual_seed(7)
    shapes = [(3, 9), (1, 4), (5, 0), (2, 17), (7, 1), (4, 12), (3, 6), (6, 3), (2, 8), (9, 5)]
    if kind == "single":
        shapes = shapes[:1]
    if kind == "many":
        shapes = [(2, 48)] * 32
    return [make_sequence(*shape, vocab_size, generator) for shape in shapes]


def make_sequence(
    num_prompt: int, num_response: int, vocab_size: int, generator: torch.Generator
) -> TrainSequence:
    """One random sequence."""

    def around(centre: float, spread: float) -> Tensor:
        return centre + spread * torch.randn(num_response, generator=generator)

    mask_T = torch.rand(num_response, generator=generator) < 0.8
    advantage_T = around(0.0, 1.0)
    # A value that must never be looked at.
    advantage_T[~mask_T] = torch.nan
    size = (num_prompt + num_response,)
    return TrainSequence(
        token_ids_L=torch.randint(0, vocab_size, size, generator=generator),
        num_prompt=num_prompt,
        mask_T=mask_T,
        rollout_logprob_T=around(-5.0, 0.5),
        advantage_T=advantage_T,
        old_logprob_T=around(-5.0, 0.5),
        reference_logprob_T=around(-5.0, 0.5),
    )


def build(case: Case, optimizer: OptimizerConfig) -> Any:
    """A policy with the weights of the case's model, which do not depend on the layout."""
    from megatron_credit.mcore.model import build_model
    from megatron_credit.mcore.parallel import start_parallel
    from megatron_credit.mcore.policy import DTYPES, Policy

    parallel = ParallelConfig(**case.parallel)
    ranks = start_parallel(parallel, seed=1, timeout_s=120)
    dtype = DTYPES[case.dtype]
    architecture = MODELS[case.model]
    chunks = build_model(architecture, parallel, dtype=dtype, seed=5, recompute=case.recompute)
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                # Drawn weights make nearly uniform predictions; wider ones tell mistakes apart.
                parameter.mul_(8.0 if parameter.dim() > 1 else 1.0)
    return Policy(
        architecture,
        chunks,
        parallel=parallel,
        optimizer=optimizer,
        ranks=ranks,
        tokens_per_microbatch=case.bound,
        router_replay=case.replayed,
    )


def run_case(case: Case) -> dict[str, Any]:
    """Metrics and gradients of one update, and the scores before it; complete on rank 0."""
    from megatron_credit.mcore.parallel import stop_parallel

    # A step too small to change anything; unclipped, so that gradients stay as they are.
    policy = build(case, OptimizerConfig(kind="adam", lr=1e-12, clip_grad=0))
    batch = make_batch(case.batch, policy.architecture.vocab_size)
    if case.replayed:
        batch = replay_checks.with_experts(batch, policy.architecture)
    scored = policy.score(batch, temperature=TEMPERATURE)
    metrics = policy.update(batch, objective=OBJECTIVE, temperature=TEMPERATURE).metrics
    gathered: list[Any] = [None] * policy.ranks.world_size
    mine = {"metrics": metrics, "gradients": gradients(policy)}
    dist.all_gather_object(gathered, mine)
    result = {
        "all_metrics": [each["metrics"] for each in gathered],
        "gradients": merge([each["gradients"] for each in gathered]),
        "scored": [vars(one) for one in scored],
        "bitwise": bitwise_gap(policy, batch, scored),
    }
    stop_parallel(keep_world=True)
    return result


def bitwise_gap(policy: Any, batch: list[TrainSequence], scored: list[Any]) -> float:
    """Largest gap between scored log-probs and those that an update's own forward pass finds."""
    from dataclasses import replace

    claimed = [
        replace(sequence, rollout_logprob_T=one.logprob_T, old_logprob_T=None)
        for sequence, one in zip(batch, scored, strict=True)
    ]
    # The weights did not move, or bf16 rounding hides that they did.
    metrics = policy.update(claimed, objective=OBJECTIVE, temperature=TEMPERATURE).metrics
    return metrics["mismatch/logprob_abs_max"]


def gradients(policy: Any) -> dict[str, Tensor]:
    """This rank's full gradients by global name, joined over the tensor ranks."""
    from megatron_credit.mcore import sharding
    from megatron_credit.mcore.names import global_name, is_vocabulary

    found = {}
    for wrapped, chunk in zip(policy.wrapped, policy.chunks, strict=True):
        if policy.parallel.distributed_optimizer:
            gather_buffers(wrapped)
        for local_name, parameter in chunk.named_parameters():
            shard = parameter.main_grad.contiguous()
            name = global_name(policy.architecture, chunk, local_name)
            _, size, group = policy.ranks.splitting(name)
            shards = [torch.empty_like(shard) for _ in range(size)]
            dist.all_gather(shards, shard, group=group)
            full = sharding.join_shards(shards, local_name)
            if sharding.split_dimension(local_name) is None:
                assert all(torch.equal(shard, other) for other in shards), local_name
            if is_vocabulary(name):
                assert full[policy.architecture.vocab_size :].abs().sum() == 0
                full = full[: policy.architecture.vocab_size]
            found[name] = full.clone()
    return found


def gather_buffers(wrapped: Any) -> None:
    """With the distributed optimizer each data rank holds a valid part of each gradient bucket."""
    for buffer in wrapped.buffers + wrapped.expert_parallel_buffers:
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            parts = list(bucket.grad_data.chunk(group.size()))
            dist.all_gather(parts, parts[group.rank()].clone(), group=group)


def merge(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The gradients of all ranks; ranks that hold the same parameter must agree."""
    merged: dict[str, Tensor] = {}
    for part in parts:
        for name, gradient in part.items():
            if name in merged:
                assert torch.allclose(gradient, merged[name], rtol=1e-6, atol=1e-9), name
            merged[name] = gradient
    return merged


def run_checkpoints(directory: Path) -> dict[str, dict[str, Any]]:
    """For each Hugging Face checkpoint in the directory, what one step of plain SGD takes from its
    weights, which is the gradient by Hugging Face name."""
    from megatron_credit.mcore.parallel import start_parallel, stop_parallel
    from megatron_credit.mcore.policy import Policy

    results = {}
    for model_dir in sorted(path.parent for path in directory.glob("*/config.json")):
        parallel = ParallelConfig()
        ranks = start_parallel(parallel, seed=1, timeout_s=120)
        policy = Policy.build(
            policy=PolicyConfig(model=model_dir, tokens_per_microbatch=64),
            optimizer=OptimizerConfig(kind="sgd", lr=1.0, clip_grad=0),
            parallel=parallel,
            ranks=ranks,
            seed=1,
        )
        batch = make_batch("mixed", policy.architecture.vocab_size)
        before = {name: tensor.clone() for name, tensor in policy.weights()}
        metrics = policy.update(batch, objective=OBJECTIVE, temperature=TEMPERATURE).metrics
        taken = {name: before[name] - tensor for name, tensor in policy.weights()}
        results[model_dir.name] = {"metrics": metrics, "gradients": taken}
        stop_parallel(keep_world=True)
    return results


def shared_payload() -> dict[str, Any]:
    """What this rank has after rank 0 gave its sequences and a header to all."""
    from megatron_credit.mcore.exchange import (
        broadcast_payload,
        decode_sequences,
        encode_sequences,
    )

    header, payload = None, None
    if dist.get_rank() == 0:
        header, payload = {"step": 3, "name": "n"}, encode_sequences(make_batch("mixed", 134))
    header, payload = broadcast_payload(header, payload)
    return {"header": header, "sequences": [vars(s) for s in decode_sequences(payload)]}


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any operation put out."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else (output,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return output


def largest_tensor() -> dict[str, int]:
    """Most elements of a tensor in scoring and in training, and tokens x vocabulary."""
    from megatron_credit.mcore.parallel import stop_parallel

    policy = build(Case("wide", bound=10_000), OptimizerConfig())
    batch = make_batch("many", policy.architecture.vocab_size)
    with LargestTensor() as scoring:
        policy.score(batch, temperature=TEMPERATURE)
    with LargestTensor() as training:
        policy.update(batch, objective=OBJECTIVE, temperature=TEMPERATURE)
    stop_parallel(keep_world=True)
    tokens = sum(sequence.num_response for sequence in batch)
    return {
        "scoring": scoring.elements,
        "training": training.elements,
        "logits": tokens * policy.architecture.vocab_size,
    }


def skipped_steps() -> dict[str, Any]:
    """What updates do that must not change anything, then one that must."""
    from dataclasses import replace

    from megatron_credit.mcore.parallel import stop_parallel

    policy = build(Case("odd"), OptimizerConfig(lr=1e-3, warmup_steps=2))
    batch = make_batch("mixed", policy.architecture.vocab_size)
    broken = [replace(batch[0], advantage_T=torch.full((9,), torch.inf)), *batch[1:]]
    untrained = [replace(s, mask_T=torch.zeros_like(s.mask_T)) for s in batch]
    start = {name: tensor.clone() for name, tensor in policy.weights()}
    results: dict[str, Any] = {}
    for name, sequences in (
        ("infinite", broken),
        ("untrained", untrained),
        ("empty", []),
        ("sound", batch),
    ):
        metrics = policy.update(sequences, objective=OBJECTIVE, temperature=TEMPERATURE).metrics
        changed = any(not torch.equal(start[key], tensor) for key, tensor in policy.weights())
        # JSON has no infinity.
        results[name] = {
            "metrics": {key: str(value) for key, value in metrics.items()},
            "changed": changed,
            "steps": policy.optimizer.num_steps,
        }
    results["scored_empty"] = policy.score([], temperature=TEMPERATURE)
    foreign = replace(batch[1], token_ids_L=torch.full_like(batch[1].token_ids_L, 131))
    try:
        policy.score([batch[0], foreign], temperature=TEMPERATURE)
    except ValueError as error:
        results["foreign"] = str(error)
    stop_parallel(keep_world=True)
    return results
