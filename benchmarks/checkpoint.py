"""How long a save stops the training, asynchronous and not, for a 40 M-parameter model on CPUs.

    OMP_NUM_THREADS=1 python benchmarks/checkpoint.py [--repeats 5] [--ranks 2] [--out FILE]

float32 with Adam: 16 bytes a parameter. Two data ranks split the optimizer's state, so a save
gathers it. Between saves there is a step of training, during which the asynchronous save writes;
`step` is that step with nothing written meanwhile. Baseline: `copy`, what the same bytes take from
memory to memory, and `file`, to one file with fsync.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from megatron_credit.batch.sequence import TrainSequence
from megatron_credit.mcore import cpu_mode
from megatron_credit.mcore.architecture import Architecture
from megatron_credit.mcore.config import OptimizerConfig, ParallelConfig
from megatron_credit.mcore.world import join_world
from megatron_credit.objective.config import ObjectiveConfig

ARCHITECTURE = Architecture(
    family="qwen3",
    num_layers=12,
    hidden_size=512,
    ffn_size=1408,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    vocab_size=8192,
    max_positions=512,
    rope_theta=1e4,
    norm_eps=1e-6,
    qkv_bias=False,
    qk_norm=True,
    tied_embeddings=True,
)
BYTES_PER_PARAMETER = 16
Seconds = dict[str, list[float]]


def build() -> Any:
    """The policy, its moments not zero any more."""
    from megatron_credit.mcore.model import build_model
    from megatron_credit.mcore.parallel import start_parallel
    from megatron_credit.mcore.policy import Policy

    parallel = ParallelConfig()
    ranks = start_parallel(parallel, seed=1, timeout_s=600)
    chunks = build_model(ARCHITECTURE, parallel, dtype=torch.float32, seed=1)
    policy = Policy(
        ARCHITECTURE,
        chunks,
        parallel=parallel,
        optimizer=OptimizerConfig(),
        ranks=ranks,
        tokens_per_microbatch=128,
    )
    step(policy)
    return policy


def step(policy: Any) -> None:
    """One small optimizer step."""
    generator = torch.Generator().manual_seed(1)
    sequences = [
        TrainSequence(
            token_ids_L=torch.randint(0, ARCHITECTURE.vocab_size, (64,), generator=generator),
            num_prompt=8,
            mask_T=torch.ones(56, dtype=torch.bool),
            rollout_logprob_T=torch.full((56,), -9.0),
            advantage_T=torch.ones(56),
            old_logprob_T=None,
            reference_logprob_T=None,
        )
        for _ in range(4)
    ]
    policy.update(sequences, objective=ObjectiveConfig(), temperature=1.0)


def seconds_of(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure(rank: int, size: int, directory: str, repeats: int) -> None:
    """What every rank does; rank 0 writes what it measured."""
    torch.set_num_threads(1)
    cpu_mode.enable()
    root = Path(directory)
    join_world(rank=rank, size=size, rendezvous=root / "rendezvous", timeout_s=600)
    policy, found = build(), {}
    for number in range(repeats + 1):
        for name, value in once(policy, root / f"save-{number}").items():
            found.setdefault(name, []).append(value)
    if rank == 0:
        parameters = sum(one.numel() for chunk in policy.chunks for one in chunk.parameters())
        found = {name: values[1:] for name, values in found.items()}  # the first warms up
        found |= baselines(root, parameters * BYTES_PER_PARAMETER, repeats)
        result = {"parameters": parameters, "seconds": found}
        (root / "result.json").write_text(json.dumps(result))
    policy.saver.finish()


def once(policy: Any, place: Path) -> dict[str, float]:
    """Both kinds of save, and a step beside each."""
    found = {"step": seconds_of(lambda: step(policy))}
    found["synchronous"] = seconds_of(lambda: policy.save(place / "synchronous"))
    state, owner = policy.training_state(), policy.owner("")
    begin = time.perf_counter()
    policy.saver.save(place / "asynchronous", state, owner, asynchronous=True)
    found["asynchronous, blocking"] = time.perf_counter() - begin
    found["step, writing"] = seconds_of(lambda: step(policy))
    policy.saver.finish()
    writing = policy.saver.take_seconds().writing
    assert writing is not None
    found["asynchronous, writing"] = writing
    if policy.ranks.rank == 0:
        shutil.rmtree(place)
    return found


def baselines(root: Path, size: int, repeats: int) -> Seconds:
    """The same bytes, without any of this."""
    data = torch.zeros(size, dtype=torch.uint8).random_()
    path = root / "file"

    def write() -> None:
        with path.open("wb") as stream:
            stream.write(data.numpy())
            stream.flush()
            os.fsync(stream.fileno())

    return {
        "copy": [seconds_of(lambda: data.clone()) for _ in range(repeats)],
        "file": [seconds_of(write) for _ in range(repeats)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--place", type=Path, help="a directory of the disk to measure")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.place) as directory:
        given = (arguments.ranks, directory, arguments.repeats)
        mp.spawn(measure, args=given, nprocs=arguments.ranks)
        result = json.loads((Path(directory) / "result.json").read_text())
    medians = {name: statistics.median(values) for name, values in result["seconds"].items()}
    size = result["parameters"] * BYTES_PER_PARAMETER
    print(f"{result['parameters'] / 1e6:.1f} M parameters, {size / 1e6:.0f} MB")
    for name, value in medians.items():
        print(f"{name:24} {value:7.3f} s")
    if arguments.out:
        machine = {"date": date.today().isoformat(), "machine": platform.processor()}
        given = {"ranks": arguments.ranks, "repeats": arguments.repeats}
        summary = machine | given | {"median_s": medians} | result
        arguments.out.write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
