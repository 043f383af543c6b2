"""Whether a layout computes the loss and the gradients that one rank computes; imports no megatron.

The ranks run `invariance_worker` in processes of their own, first one rank alone, then the layout,
on the same weights and the same sequences. What float32 may differ by is measured, not assumed: one
rank also computes the step packed otherwise, with every weight off by its last bit.
"""

import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from safetensors.torch import load_file
from torch import Tensor

from megatron_credit.errors import FailedProcess
from megatron_credit.mcore import cpu_mode
from megatron_credit.mcore.architecture import Architecture, check_parallel, data_parallel_size
from megatron_credit.mcore.config import ParallelConfig
from megatron_credit.mcore.memory import rank_parameters
from megatron_credit.mcore.world import join_world, silence_libraries
from megatron_credit.objective.config import ObjectiveConfig

TIMEOUT_S = 600.0
"""Bound on each collective."""
SMALL = 20_000_000
"""A model of at most this many parameters is checked as it is."""
WIDTH = 64
"""Hidden size and feed-forward of a twin, at least."""
VOCABULARY = 512
EARNED = 10.0
"""A layout may be off by this many times what the last bits of the weights do."""
ROUNDING = 1e-6
"""The least tolerance, relative: a few units in the last place of float32."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the ranks compute."""

    architecture: Architecture
    weights: Path | None
    """Hugging Face directory of the weights; None: drawn from their names."""
    parallel: ParallelConfig
    num_processes: int
    objective: ObjectiveConfig
    temperature: float
    recompute: str = "none"

    def alone(self) -> "Job":
        """The same on one rank."""
        return replace(self, parallel=ParallelConfig(), num_processes=1, recompute="none")


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """How far a number, or the numbers of one gradient, lie from those of one rank."""

    name: str
    largest: float
    """Of one rank, the largest absolute value."""
    error: float
    """Largest difference over that."""
    noise: float
    """As `error`, of one rank that packs otherwise, with other last bits of the weights."""


@dataclass(frozen=True, kw_only=True)
class Invariance:
    """What was found; gradients with the largest error come first."""

    loss: Deviation
    gradients: list[Deviation]
    tolerance: float

    @property
    def wrong(self) -> list[Deviation]:
        """What is further off than rounding explains."""
        return [one for one in (self.loss, *self.gradients) if not one.error <= self.tolerance]


def make_twin(architecture: Architecture, parallel: ParallelConfig) -> Architecture:
    """A narrow model of few layers that every axis divides as it divides `architecture`.

    Family, heads, head size, experts and rotary positions are the same; so is what the vocabulary
    leaves when the tensor ranks have divided it.
    """
    tensor, stages = parallel.tensor, parallel.pipeline * parallel.virtual_pipeline
    width = tensor * -(-WIDTH // tensor)
    rows = tensor * -(-VOCABULARY // tensor) + architecture.vocab_size % tensor
    split = parallel.expert_tensor
    return replace(
        architecture,
        num_layers=min(architecture.num_layers, stages * -(-2 // stages)),
        hidden_size=min(architecture.hidden_size, width),
        ffn_size=min(architecture.ffn_size, 2 * width),
        expert_ffn_size=min(architecture.expert_ffn_size, split * -(-WIDTH // (2 * split))),
        vocab_size=min(architecture.vocab_size, rows),
    )


def is_small(architecture: Architecture) -> bool:
    """Whether the model is checked as it is."""
    count = rank_parameters(architecture, ParallelConfig(), 0)
    return count.dense + count.expert <= SMALL


def fewest_processes(architecture: Architecture, parallel: ParallelConfig, num: int) -> int:
    """The smallest world that has every axis of a layout of `num` processes, data among them."""
    data = data_parallel_size(parallel, num)
    replica = num // data
    for replicas in range(min(2, data), data):
        try:
            check_parallel(architecture, parallel, replica * replicas)
        except ValueError:
            continue
        return replica * replicas
    return num


def check_invariance(job: Job) -> Invariance:
    """Runs `job` alone and as it is, and compares. FailedProcess: a rank failed, with its error."""
    with tempfile.TemporaryDirectory(prefix="megatron-credit-") as name:
        directory = Path(name)
        run_world(run_rank, job.alone(), directory, is_reference=True)
        run_world(run_rank, job, directory, is_reference=False)
        return read_verdict(directory)


def read_verdict(directory: Path) -> Invariance:
    """The verdict on what the ranks left in `directory`."""
    found: dict[str, Tensor] = {}
    for path in directory.glob("layout-*.safetensors"):
        found |= load_file(path)
    one, rounded = (load_file(directory / f"{name}.safetensors") for name in ("one", "rounded"))
    return compare(one, rounded, found)


def run_rank(rank: int, job: Job, directory: Path, is_reference: bool) -> None:
    """What each rank runs, in a process of its own; see `invariance_worker`."""
    silence_libraries()
    cpu_mode.enable()  # before anything imports megatron
    join_world(
        rank=rank,
        size=job.num_processes,
        rendezvous=directory / f"rendezvous-{is_reference}",
        timeout_s=TIMEOUT_S,
    )
    from megatron_credit.mcore import invariance_worker

    if is_reference:
        invariance_worker.compute_reference(job, directory)
    else:
        invariance_worker.compute_layout(job, directory)
    dist.destroy_process_group()


def run_world(
    rank_program: Callable[..., None], job: Job, directory: Path, *, is_reference: bool
) -> None:
    """Runs every rank of `job` to its end."""
    try:
        multiprocessing.spawn(
            rank_program, args=(job, directory, is_reference), nprocs=job.num_processes
        )
    except (
        multiprocessing.ProcessRaisedException,
        multiprocessing.ProcessExitedException,
    ) as error:
        raise FailedProcess(
            f"a rank of {job.num_processes} failed in the check of the layout: {error}"
        ) from None


def compare(
    one: Mapping[str, Tensor], rounded: Mapping[str, Tensor], found: Mapping[str, Tensor]
) -> Invariance:
    """The verdict on what a layout `found`; `one` and `rounded` are of one rank."""
    names = sorted(set(one) ^ set(found))
    if names:
        raise FailedProcess(f"one rank and the layout have different parameters: {names[:5]}")
    deviations = {name: deviation(name, one, rounded, found) for name in one}
    loss = deviations.pop("loss")
    noise = max(one.noise for one in (loss, *deviations.values()))
    return Invariance(
        loss=loss,
        gradients=sorted(deviations.values(), key=lambda one: -one.error),
        tolerance=EARNED * max(noise, ROUNDING),
    )


def deviation(
    name: str, one: Mapping[str, Tensor], rounded: Mapping[str, Tensor], found: Mapping[str, Tensor]
) -> Deviation:
    """How far `found[name]` and `rounded[name]` lie from `one[name]`."""
    expected = one[name]
    largest = float(expected.abs().max())
    scale = max(largest, torch.finfo(torch.float32).tiny)
    gaps = [float((each[name] - expected).abs().max()) / scale for each in (found, rounded)]
    error, noise = (math.inf if math.isnan(gap) else gap for gap in gaps)
    return Deviation(name=name, largest=largest, error=error, noise=noise)
