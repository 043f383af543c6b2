"""How much memory a run will need, and whether this machine has it."""

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from megatron_credit.mcore.architecture import Architecture
from megatron_credit.mcore.memory import (
    CheckpointMemory,
    RankMemory,
    checkpoint_memory,
    engine_memory,
    trainer_memory,
)
from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.evidence_teacher import teacher_of

MIB = 2**20
TRAINER_PROCESS = 700 * MIB
"""A trainer rank before it has a model: Python, torch, megatron, transformers."""
ENGINE_PROCESS = 1600 * MIB
"""vLLM's processes before they have a model."""
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What there is to use, in bytes."""

    host: int
    """Free memory of the host, as far as this job may use it."""
    gpus: tuple[int, ...]
    """Memory of each CUDA device."""

    @classmethod
    def here(cls) -> "Machine":
        """This machine."""
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        free = psutil.virtual_memory().available
        limit = CGROUP_LIMIT.read_text().strip() if CGROUP_LIMIT.is_file() else "max"
        return cls(
            host=free if limit == "max" else min(free, int(limit)),
            gpus=tuple(torch.cuda.get_device_properties(k).total_memory for k in range(count)),
        )


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Bytes, processes apart."""

    stages: tuple[RankMemory, ...]
    """A trainer rank of each pipeline stage."""
    ranks_per_stage: int
    engine_weights: int
    """Of each engine rank; 0: the engine is not ours."""
    sequence_cache: int
    """Keys and values of one sequence of the longest length, on each engine rank."""
    engine_cache: int
    """Keys and values that an engine rank on a CPU has room for."""
    checkpoint: int
    """A checkpoint, on the disk."""
    staging: int
    """What a save copies to the host's memory, all ranks together."""

    @property
    def trainer_total(self) -> int:
        """All trainer ranks with their processes."""
        ranks = sum(stage.total for stage in self.stages) * self.ranks_per_stage
        return ranks + TRAINER_PROCESS * self.ranks_per_stage * len(self.stages)

    def engine_total(self, num_ranks: int) -> int:
        """All engine ranks on a CPU with their processes."""
        if not self.engine_weights:
            return 0
        return num_ranks * (self.engine_weights + self.engine_cache + ENGINE_PROCESS)


def predict(
    config: RunConfig, architecture: Architecture, *, has_engine: bool = True
) -> Prediction:
    """The memory of a run. Without `engine.max_model_len` the model's own bound counts."""
    engine = config.engine
    width = 4 if engine.dtype == "float32" else 2  # vLLM's `auto` takes 16 bits for float32 too
    one = engine_memory(architecture, bytes_per_number=width, tensor=engine.tensor_parallel)
    checkpoint = checkpoint_memory(
        architecture,
        policy=config.policy,
        optimizer=config.optimizer,
        teacher=teacher_of(config),
    )
    stages = trainer_memory(
        architecture,
        policy=config.policy,
        optimizer=config.optimizer,
        parallel=config.parallel,
        num_processes=config.num_processes,
        teacher=teacher_of(config),
    )
    return Prediction(
        stages=tuple(stages),
        ranks_per_stage=config.num_processes // config.parallel.pipeline,
        engine_weights=one.weights if has_engine and engine.address is None else 0,
        sequence_cache=one.kv_per_token * (engine.max_model_len or architecture.max_positions),
        engine_cache=engine.kv_cache_mib * MIB,
        checkpoint=checkpoint.total,
        staging=staging(config, checkpoint),
    )


def staging(config: RunConfig, checkpoint: CheckpointMemory) -> int:
    """What of a checkpoint is in the host's memory while it is written: all of it where training
    goes on meanwhile, else what had to be gathered from the ranks that share it."""
    if config.checkpoint.asynchronous and config.checkpoint.every:
        return checkpoint.total
    is_split = config.parallel.distributed_optimizer and config.optimizer.kind == "adam"
    return checkpoint.optimizer if is_split else 0


def check_fits(config: RunConfig, prediction: Prediction, machine: Machine) -> str:
    """What fits into what, in words; ValueError where it does not."""
    return (on_gpus if machine.gpus else on_cpu)(config, prediction, machine)


def on_cpu(config: RunConfig, prediction: Prediction, machine: Machine) -> str:
    """Everything shares the host's memory."""
    engine = prediction.engine_total(config.engine.tensor_parallel)
    if engine and prediction.sequence_cache > prediction.engine_cache:
        raise ValueError(
            f"one sequence of {config.engine.max_model_len} tokens needs "
            f"{size(prediction.sequence_cache)} of KV cache, but engine.kv_cache_mib="
            f"{config.engine.kv_cache_mib}; raise it, or lower engine.max_model_len"
        )
    needed = prediction.trainer_total + engine + prediction.staging
    words = (
        f"trainer {size(prediction.trainer_total)} + engine {size(engine)} + a save "
        f"{size(prediction.staging)} = {size(needed)} of {size(machine.host)} free"
    )
    if needed > machine.host:
        raise ValueError(f"{words}; {advice(config)}, or use a larger machine")
    return words


def on_gpus(config: RunConfig, prediction: Prediction, machine: Machine) -> str:
    """Rank i has device i; the engine takes its share of the first devices. Saves are copied to the
    host's memory."""
    num_gpus, num_ranks = len(machine.gpus), config.num_processes
    if num_ranks > num_gpus:
        raise ValueError(
            f"{num_ranks} trainer ranks need as many GPUs, this machine has {num_gpus}; lower "
            "run.processes and [parallel], or start the run where there are enough"
        )
    shared = config.engine.tensor_parallel if prediction.engine_weights else 0
    tightest = ""
    least = None
    for rank in range(num_ranks):
        total = machine.gpus[rank]
        engine = int(config.engine.gpu_memory * total) if rank < shared else 0
        needed = prediction.stages[rank // prediction.ranks_per_stage].total + engine
        words = f"GPU {rank}: {size(needed)} of {size(total)}" + (
            f", {size(engine)} of it the engine's" if engine else ""
        )
        if needed > total:
            lower = "lower engine.gpu_memory, or " if engine else ""
            raise ValueError(f"{words}; {lower}{advice(config)}")
        if least is None or total - needed < least:
            least, tightest = total - needed, words
    if prediction.staging > machine.host:
        raise ValueError(
            f"a save copies {size(prediction.staging)} to the host's memory, of which "
            f"{size(machine.host)} are free; checkpoint.asynchronous = false with "
            "parallel.distributed_optimizer = false needs no copy"
        )
    return f"tightest is {tightest}"


def advice(config: RunConfig) -> str:
    """What to change in the trainer for less memory."""
    steps = ["lower policy.tokens_per_microbatch"]
    if config.policy.recompute == "none":
        steps.append('set policy.recompute = "full"')
    if config.policy.dtype == "fp32":
        steps.append('set policy.dtype = "bf16"')
    return ", ".join([*steps, "raise parallel.tensor or parallel.pipeline"])


def size(count: int) -> str:
    """Bytes in a unit that people read."""
    if count >= 2**30:
        return f"{count / 2**30:.1f} GiB"
    return f"{count / MIB:.1f} MiB"
