"""What every rank of the memory tests runs: real bytes under one layout after another."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mcore.parity_worker import SIZES, make_sequence
from torch import Tensor

from megatron_credit.mcore import cpu_mode
from megatron_credit.mcore.architecture import Architecture
from megatron_credit.mcore.config import OptimizerConfig, ParallelConfig, PolicyConfig
from megatron_credit.mcore.memory import checkpoint_memory, trainer_memory
from megatron_credit.mcore.world import join_world
from megatron_credit.objective.config import ObjectiveConfig

WORLD_SIZE = 4
# Wide enough that the tables of positions and the statistics of norms are not what is measured.
WIDE = SIZES | {"hidden_size": 128, "ffn_size": 192, "num_heads": 8, "num_kv_heads": 4}
EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 96}
MODELS = {
    "tied": Architecture(**WIDE, vocab_size=134, tied_embeddings=True),
    "plain": Architecture(
        **WIDE | {"qkv_bias": True, "qk_norm": False}, vocab_size=131, tied_embeddings=False
    ),
    "moe": Architecture(**WIDE | EXPERTS, vocab_size=134, tied_embeddings=False),
}
MICROBATCH = 64
LENGTHS = [(4, 12)] * 32


@dataclass(frozen=True)
class Case:
    """A model, how it is laid out over four ranks, and how it is trained."""

    model: str
    parallel: dict[str, Any] = field(default_factory=dict)
    dtype: str = "fp32"
    recompute: str = "none"
    optimizer: str = "adam"


TP2_SP = {"tensor": 2, "sequence_parallel": True}
CASES = {
    "tied": Case("tied"),
    "plain": Case("plain"),
    "bf16": Case("tied", dtype="bf16"),
    "whole": Case("tied", {"distributed_optimizer": False}, dtype="bf16"),
    "sgd": Case("tied", optimizer="sgd", dtype="bf16"),
    "recompute": Case("tied", recompute="full"),
    "tp2": Case("plain", {"tensor": 2}),
    "tp4_sp": Case("plain", {"tensor": 4, "sequence_parallel": True}),
    "pp2": Case("tied", {"pipeline": 2}),
    "pp4_recompute": Case("plain", {"pipeline": 4}, recompute="full"),
    "pp2_vpp2": Case("plain", {"pipeline": 2, "virtual_pipeline": 2}),
    "cp2": Case("tied", {"context": 2}),
    "tp2_sp_pp2_bf16": Case("tied", TP2_SP | {"pipeline": 2}, dtype="bf16"),
    "moe": Case("moe"),
    "ep2": Case("moe", {"expert": 2}),
    "ep4_tp2_sp": Case("moe", TP2_SP | {"expert": 4}, dtype="bf16"),
    "tp2_cp2": Case("plain", TP2_SP | {"context": 2}),
    "ep2_etp2": Case("moe", {"expert": 2, "expert_tensor": 2}),
}


def run(rank: int, directory: str) -> None:
    """Measures every case; rank 0 writes `results.json`: predicted and real bytes of each rank."""
    torch.set_num_threads(1)
    cpu_mode.enable()
    rendezvous = Path(directory, "rendezvous")
    join_world(rank=rank, size=WORLD_SIZE, rendezvous=rendezvous, timeout_s=120)
    results = {name: run_case(case) for name, case in CASES.items()}
    gathered: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(gathered, results)
    if rank == 0:
        by_case = {name: [part[name] for part in gathered] for name in CASES}
        Path(directory, "results.json").write_text(json.dumps(by_case))
    dist.destroy_process_group()


def run_case(case: Case) -> dict[str, dict[str, int]]:
    """Predicted and real bytes of this rank, and where it stands."""
    from megatron_credit.mcore.model import build_model
    from megatron_credit.mcore.parallel import start_parallel, stop_parallel
    from megatron_credit.mcore.policy import DTYPES, Policy

    architecture, parallel = MODELS[case.model], ParallelConfig(**case.parallel)
    optimizer = OptimizerConfig(kind=case.optimizer, lr=1e-6)
    settings = PolicyConfig(
        model=Path("none"),
        dtype=case.dtype,
        recompute=case.recompute,
        tokens_per_microbatch=MICROBATCH,
    )
    ranks = start_parallel(parallel, seed=1, timeout_s=120)
    chunks = build_model(
        architecture, parallel, dtype=DTYPES[case.dtype], seed=5, recompute=case.recompute
    )
    policy = Policy(
        architecture,
        chunks,
        parallel=parallel,
        optimizer=optimizer,
        ranks=ranks,
        tokens_per_microbatch=MICROBATCH,
    )
    real = static_bytes(policy) | {
        "activations": peak_of_saved(policy),
        "checkpoint": saved_bytes(policy),
    }
    stop_parallel(keep_world=True)
    predicted = trainer_memory(
        architecture,
        policy=settings,
        optimizer=optimizer,
        parallel=parallel,
        num_processes=WORLD_SIZE,
    )
    checkpoint = checkpoint_memory(architecture, policy=settings, optimizer=optimizer)
    axes = ("rank", "pp_rank", "dp_rank", "cp_rank", "tp_rank", "ep_rank", "etp_rank")
    return {
        "real": real,
        "predicted": vars(predicted[ranks.pp_rank]) | {"checkpoint": checkpoint.total},
        "place": {axis.removesuffix("_rank"): vars(ranks)[axis] for axis in axes},
    }


def static_bytes(policy: Any) -> dict[str, int]:
    """What stays between the steps."""
    parameters = [p for chunk in policy.chunks for p in chunk.parameters()]
    buffers = [
        buffer
        for wrapped in policy.wrapped
        for buffer in wrapped.buffers + wrapped.expert_parallel_buffers
    ]
    owned = {p.untyped_storage().data_ptr() for p in parameters}
    optimizer = 0
    for part in policy.optimizer.parts():
        for group in part.optimizer.param_groups:
            # Masters of float32 weights are the weights themselves.
            masters = [p for p in group["params"] if p.untyped_storage().data_ptr() not in owned]
            states = [part.optimizer.state[p] for p in group["params"]]
            moments = [s[name] for s in states for name in ("exp_avg", "exp_avg_sq") if name in s]
            optimizer += sum(tensor.nbytes for tensor in masters + moments)
    return {
        "weights": sum(p.nbytes for p in parameters),
        "gradients": sum(p.main_grad.nbytes for p in parameters),
        "buffers": sum(buffer.grad_data.nbytes for buffer in buffers),
        "optimizer": optimizer,
    }


def saved_bytes(policy: Any) -> int:
    """What this rank copies for an asynchronous save."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    found = [one.data for one in nested_values(policy.training_state().written(copied=True))]
    return sum(one.nbytes for one in found if isinstance(one, Tensor) and not one.is_meta)


class SavedBytes:
    """Counts the storages that autograd keeps, each once, those of parameters not at all."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.owned = {p.untyped_storage().data_ptr() for p in parameters}
        self.holders: dict[int, int] = {}
        self.now = self.peak = 0

    def keep(self, tensor: Tensor) -> "Kept":
        """The pack hook."""
        return Kept(self, tensor)


class Kept:
    """A tensor for as long as autograd keeps it."""

    def __init__(self, count: SavedBytes, tensor: Tensor) -> None:
        self.count, self.tensor = count, tensor
        self.place = tensor.untyped_storage().data_ptr()
        if self.place not in count.owned:
            count.holders[self.place] = count.holders.get(self.place, 0) + 1
            if count.holders[self.place] == 1:
                count.now += tensor.untyped_storage().nbytes()
                count.peak = max(count.peak, count.now)

    def __del__(self) -> None:
        if self.place not in self.count.owned:
            self.count.holders[self.place] -= 1
            if not self.count.holders[self.place]:
                self.count.now -= self.tensor.untyped_storage().nbytes()


def peak_of_saved(policy: Any) -> int:
    """Most bytes that autograd held at once during one update of full micro-batches."""
    generator = torch.Generator().manual_seed(1)
    vocabulary = policy.architecture.vocab_size
    sequences = [make_sequence(*shape, vocabulary, generator) for shape in LENGTHS]
    count = SavedBytes([p for chunk in policy.chunks for p in chunk.parameters()])
    with torch.autograd.graph.saved_tensors_hooks(count.keep, lambda kept: kept.tensor):
        policy.update(sequences, objective=ObjectiveConfig(), temperature=1.0)
    return count.peak
