"""Loss and full gradients of one step under a layout. Imported after `cpu_mode.enable()`."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_credit.batch.sequence import TrainSequence
from megatron_credit.mcore import sharding
from megatron_credit.mcore.config import OptimizerConfig
from megatron_credit.mcore.convert import Converter
from megatron_credit.mcore.exchange import decode_sequences, encode_sequences
from megatron_credit.mcore.hf_files import open_checkpoint
from megatron_credit.mcore.invariance import TIMEOUT_S, Job
from megatron_credit.mcore.model import build_model
from megatron_credit.mcore.names import is_vocabulary
from megatron_credit.mcore.parallel import start_parallel, stop_parallel
from megatron_credit.mcore.policy import Policy

PACKED = 96
"""Tokens of a micro-batch: several sequences each, several micro-batches a rank."""
NUM_SEQUENCES = 24
LONGEST = 40


def compute_reference(job: Job, directory: Path) -> None:
    """One rank's loss and gradients, twice: packed as in the layout; and each sequence alone, with
    every weight off by its last bit."""
    policy = build_policy(job, PACKED)
    sequences = with_own_logprobs(policy, draw_sequences(job), job.temperature)
    save_file(encode_sequences(sequences), directory / "sequences.safetensors")
    save_file(step(policy, job, sequences), directory / "one.safetensors")
    policy.batching = replace(policy.batching, tokens_per_microbatch=1)
    flip_last_bits(policy)
    save_file(step(policy, job, sequences), directory / "rounded.safetensors")
    stop_parallel(keep_world=True)


@torch.no_grad()
def flip_last_bits(policy: Policy) -> None:
    """Moves every weight up or down by one unit of float32 in its last place.

    A product that is rounded otherwise is a product of weights that differ by that much, so what
    this does to the gradients is what another order of sums may do to them.
    """
    generator = torch.Generator().manual_seed(2)
    for chunk in policy.chunks:
        for parameter in chunk.parameters():
            up = torch.randint(0, 2, parameter.shape, generator=generator).to(parameter.device)
            parameter.mul_(1 + (2 * up - 1) * torch.finfo(torch.float32).eps)


def compute_layout(job: Job, directory: Path) -> None:
    """The layout's loss and gradients; the ranks that hold them write a file each."""
    sequences = decode_sequences(load_file(directory / "sequences.safetensors"))
    policy = build_policy(job, PACKED)
    found = step(policy, job, sequences)
    if found:
        save_file(found, directory / f"layout-{policy.ranks.rank}.safetensors")
    stop_parallel(keep_world=True)


def build_policy(job: Job, bound: int) -> Policy:
    """The model in float32 with the weights that every layout gets."""
    ranks = start_parallel(job.parallel, seed=0, timeout_s=TIMEOUT_S)
    chunks = build_model(
        job.architecture, job.parallel, dtype=torch.float32, seed=None, recompute=job.recompute
    )
    converter = Converter(job.architecture, chunks, ranks)
    shapes = {meta.name: meta.shape for meta in converter.metadata()}
    converter.load(drawn(shapes) if job.weights is None else open_checkpoint(job.weights))
    return Policy(
        job.architecture,
        chunks,
        parallel=job.parallel,
        # A step too small to change anything; unclipped, so that gradients stay as they are.
        optimizer=OptimizerConfig(lr=1e-12, clip_grad=0),
        ranks=ranks,
        tokens_per_microbatch=bound,
    )


def drawn(shapes: dict[str, tuple[int, ...]]) -> Callable[[str], Tensor]:
    """A function from a Hugging Face name to random numbers that only the name decides.

    Norms and biases are random too: where they are 1 and 0, a wrong split of them cannot be seen.
    """

    def read(name: str) -> Tensor:
        shape = shapes[name]
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        if len(shape) == 1:
            return noise * 0.1 + (1.0 if "norm" in name else 0.0)
        return noise / shape[-1] ** 0.5

    return read


def draw_sequences(job: Job) -> list[TrainSequence]:
    """Random sequences of many lengths, with credit for four of five response tokens."""
    generator = torch.Generator().manual_seed(11)
    longest = min(LONGEST, job.architecture.max_positions)

    def one() -> TrainSequence:
        length = int(torch.randint(2, longest + 1, (), generator=generator))
        num_prompt = int(torch.randint(1, min(8, length), (), generator=generator))
        num_response = length - num_prompt
        return TrainSequence(
            token_ids_L=torch.randint(
                0, job.architecture.vocab_size, (length,), generator=generator
            ),
            num_prompt=num_prompt,
            mask_T=torch.rand(num_response, generator=generator) < 0.8,
            rollout_logprob_T=torch.zeros(num_response),
            advantage_T=torch.randn(num_response, generator=generator),
            old_logprob_T=None,
            reference_logprob_T=None,
        )

    return [one() for _ in range(NUM_SEQUENCES)]


def with_own_logprobs(
    policy: Policy, sequences: list[TrainSequence], temperature: float
) -> list[TrainSequence]:
    """The sequences as if this policy had sampled them: ratios are 1, no clip or mask decides by a
    rounding error."""
    scored = policy.score(sequences, temperature=temperature)
    return [
        replace(sequence, rollout_logprob_T=one.logprob_T)
        for sequence, one in zip(sequences, scored, strict=True)
    ]


def step(policy: Policy, job: Job, sequences: list[TrainSequence]) -> dict[str, Tensor]:
    """`loss` and each full gradient by global name, on the ranks that are the first to hold it."""
    metrics = policy.update(sequences, objective=job.objective, temperature=job.temperature).metrics
    found = {"loss": torch.tensor(metrics["loss"], dtype=torch.float64)}
    for name, gradient in full_gradients(policy):
        found[name] = gradient
    return found


def full_gradients(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """(global name, gradient summed and joined over all ranks). Collective."""
    ranks = policy.ranks
    for wrapped, chunk in zip(policy.wrapped, policy.chunks, strict=True):
        if wrapped.ddp_config.use_distributed_optimizer:
            gather_buffers(wrapped)
        for local_name, parameter in chunk.named_parameters():
            name = policy.converter.global_name(chunk, local_name)
            gradient = parameter.main_grad.contiguous()
            rank, size, group = ranks.splitting(name)
            shards = [torch.empty_like(gradient) for _ in range(size)]
            dist.all_gather(shards, gradient, group=group)
            if rank or (ranks.dp_cp_rank and not sharding.is_experts(name)):
                continue
            full = sharding.join_shards(shards, name).cpu()
            yield name, full[: policy.architecture.vocab_size] if is_vocabulary(name) else full


def gather_buffers(wrapped: DistributedDataParallel) -> None:
    """The distributed optimizer leaves each data rank a valid part of each gradient bucket."""
    for buffer in wrapped.buffers + wrapped.expert_parallel_buffers:
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            parts = list(bucket.grad_data.chunk(group.size()))
            dist.all_gather(parts, parts[group.rank()].clone(), group=group)
