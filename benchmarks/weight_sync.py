"""Weight sync to real vLLM servers against a raw Gloo broadcast of the same bytes, on CPUs.

    OMP_NUM_THREADS=1 python benchmarks/weight_sync.py [--repeats 9] [--layers 8] [--out FILE]

A 10 M-parameter model in float32. `transport` packs, broadcasts and unpacks between two processes,
as the sync does. `transfer` is that to a vLLM server, until it has loaded the last tensor; `sync`
adds the control calls around it (vLLM sleeps 20 ms in its pause), the repacking of the layers and
the reset of the prefix cache.

`two_engines` is a sync to two servers, measured in turn with that to one of them. Loading computes,
so where cores are few it is bounded by the CPU time of both engines and of the trainer: `bound` is
that time over the cores, or the time to one engine where that is more.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
import torch.multiprocessing as mp
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_credit.rollouts.buckets import Piece, bucket_bytes, pack, plan_buckets, unpack
from megatron_credit.rollouts.client import EngineClient
from megatron_credit.rollouts.config import EngineConfig
from megatron_credit.rollouts.gloo_group import GlooGroup
from megatron_credit.rollouts.gloo_sender import DEFAULT_BUCKET_MIB, GlooSender
from megatron_credit.rollouts.server import EngineServer
from megatron_credit.rollouts.sync import WeightSync

CONFIG = EngineConfig(dtype="float32", max_model_len=128, kv_cache_mib=64)


class TimedSender(GlooSender):
    """Measures the time from the first byte until the engines have loaded the last."""

    transfer_s = 0.0

    def _transfer(self, *arguments) -> None:
        start = time.perf_counter()
        super()._transfer(*arguments)
        self.transfer_s = time.perf_counter() - start


def receiver(port: int, sizes: list[int], repeats: int) -> None:
    """The other end of the raw broadcast."""
    torch.set_num_threads(1)
    group = GlooGroup("127.0.0.1", port, rank=1, world_size=2, timeout_s=60)
    group.join()
    for _ in range(repeats):
        for size in sizes:
            data = torch.empty(size, dtype=torch.uint8)
            group.start_broadcast(data)
            group.finish_broadcast()


def unpacker(port: int, pieces: list[Piece], limit: int, repeats: int) -> None:
    """The other end of the transport: an engine that does nothing with what it gets."""
    torch.set_num_threads(1)
    group = GlooGroup("127.0.0.1", port, rank=1, world_size=2, timeout_s=60)
    group.join()
    for _ in range(repeats):
        meet(group)
        for bucket in plan_buckets(pieces, limit):
            data = torch.empty(bucket_bytes(bucket), dtype=torch.uint8)
            group.start_broadcast(data)
            group.finish_broadcast()
            list(unpack(bucket, data))
        meet(group)


def meet(group: GlooGroup) -> None:
    """Returns when the other end is here too."""
    byte = torch.empty(1, dtype=torch.uint8)
    group.start_broadcast(byte)
    group.finish_broadcast()


def transport(weights: list, pieces: list[Piece], limit: int, repeats: int) -> list[float]:
    """Seconds of each passage of all weights to another process, packed and unpacked."""
    group = GlooGroup("127.0.0.1", 0, rank=0, world_size=2, timeout_s=60)
    process = mp.get_context("spawn").Process(
        target=unpacker, args=(group.port, pieces, limit, repeats)
    )
    process.start()
    group.join()
    seconds = []
    for _ in range(repeats):
        meet(group)
        start, stream, under_way = time.perf_counter(), iter(weights), None
        for bucket in plan_buckets(pieces, limit):
            data = pack(bucket, stream)
            if under_way is not None:
                group.finish_broadcast()
            group.start_broadcast(data)
            under_way = data
        group.finish_broadcast()
        meet(group)
        seconds.append(time.perf_counter() - start)
    process.join()
    return seconds


def raw_broadcast(num_bytes: int, repeats: int) -> list[float]:
    """Seconds of each broadcast of so many bytes between two processes."""
    group = GlooGroup("127.0.0.1", 0, rank=0, world_size=2, timeout_s=60)
    data = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8)
    process = mp.get_context("spawn").Process(
        target=receiver, args=(group.port, [1, num_bytes], repeats)
    )
    process.start()
    group.join()
    seconds = []
    for _ in range(repeats):
        group.start_broadcast(data[:1])  # both ends are ready when it has arrived
        group.finish_broadcast()
        start = time.perf_counter()
        group.start_broadcast(data)
        group.finish_broadcast()
        seconds.append(time.perf_counter() - start)
    process.join()
    return seconds


def some_model(num_layers: int) -> Qwen3ForCausalLM:
    """A model of 2.1 M parameters and 1 M for each layer."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=8192,
            hidden_size=256,
            intermediate_size=1024,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            eos_token_id=1,
            pad_token_id=0,
        )
    ).float()


class Started(NamedTuple):
    """A server that serves."""

    server: EngineServer
    client: EngineClient


class Syncs(NamedTuple):
    """Seconds of each sync to some engines: of its transfer, of all of it, and of CPU time."""

    transfers: list[float]
    walls: list[float]
    engine_cpus: list[float]
    trainer_cpus: list[float]


@contextmanager
def started(path: Path, config: EngineConfig, number: int) -> Iterator[list[Started]]:
    """So many servers of the model in path/model."""
    servers = [
        EngineServer.start(path / "model", config, log_path=path / f"engine-{k}.log", seed=0)
        for k in range(number)
    ]
    try:
        for server in servers:
            server.wait_ready(300)
        yield [
            Started(
                server, EngineClient(server.address, request_timeout_s=60, api_key=server.api_key)
            )
            for server in servers
        ]
    finally:
        for server in servers:
            server.stop()


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """CPU time of these processes so far."""
    times = [process.cpu_times() for process in processes]
    return sum(one.user + one.system for one in times)


def engine_syncs(
    model: Qwen3ForCausalLM, path: Path, config: EngineConfig, repeats: int
) -> dict[int, Syncs]:
    """Syncs to one and to two engines, in turn."""
    model.save_pretrained(path / "model")
    weights = [(n, p) for n, p in model.named_parameters() if n != "lm_head.weight"]
    pieces = [Piece(name, p.dtype, tuple(p.shape)) for name, p in weights]
    found = {number: Syncs([], [], [], []) for number in (1, 2)}
    with started(path, config, 2) as engines:
        below = [
            process
            for engine in engines
            for process in psutil.Process(engine.server.pid).children(recursive=True)
        ]
        sync = WeightSync(config)
        sender = sync._sender = TimedSender(config)
        for version in range(repeats + 1):
            for number, into in found.items():
                clients = [engine.client for engine in engines[:number]]
                cpu, own = cpu_seconds(below), time.process_time()
                start = time.perf_counter()
                failed = sync.send(clients, pieces, iter(weights), version=version)
                wall = time.perf_counter() - start
                assert not failed
                if version == 0:  # connects
                    continue
                into.walls.append(wall)
                into.transfers.append(sender.transfer_s)
                into.engine_cpus.append(cpu_seconds(below) - cpu)
                into.trainer_cpus.append(time.process_time() - own)
    return found


def two_engine_figures(syncs: dict[int, Syncs], cores: int) -> dict[str, float]:
    """How much more a sync to two engines takes, and how much it must take here."""
    one, two = statistics.median(syncs[1].walls), statistics.median(syncs[2].walls)
    # CPU times are counted in ticks of 10 ms: only their mean is precise.
    work = statistics.mean(syncs[2].engine_cpus) + statistics.mean(syncs[2].trainer_cpus)
    return {
        "cores": cores,
        "two_engines_s": two,
        "two_engines_ratio": two / one,
        "two_engines_transfer_ratio": statistics.median(syncs[2].transfers)
        / statistics.median(syncs[1].transfers),
        "engine_cpu_s": statistics.mean(syncs[1].engine_cpus),
        "trainer_cpu_s": statistics.mean(syncs[1].trainer_cpus),
        "two_engines_cpu_s": work,
        "two_engines_bound_ratio": max(one, work / cores) / one,
    }


def main() -> None:
    """Measures both in one run and prints the ratio of medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--bucket-mib", type=int, default=DEFAULT_BUCKET_MIB)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/weight_sync_cpu.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = CONFIG.model_copy(update={"bucket_mib": arguments.bucket_mib})
    model = some_model(arguments.layers)
    num_bytes = sum(p.nbytes for p in model.parameters())
    with tempfile.TemporaryDirectory() as path:
        before = raw_broadcast(num_bytes, arguments.repeats)
        weights = [(n, p) for n, p in model.named_parameters() if n != "lm_head.weight"]
        pieces = [Piece(name, p.dtype, tuple(p.shape)) for name, p in weights]
        passages = transport(weights, pieces, config.bucket_mib << 20, arguments.repeats)
        found = engine_syncs(model, Path(path), config, arguments.repeats)
        after = raw_broadcast(num_bytes, arguments.repeats)
    raw = statistics.median(before + after)
    transfers, syncs = found[1].transfers, found[1].walls
    result = {
        "date": date.today().isoformat(),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "bytes": num_bytes,
        "raw_broadcast_s": raw,
        "transport_s": statistics.median(passages),
        "transfer_s": statistics.median(transfers),
        "sync_s": statistics.median(syncs),
        "bucket_mib": config.bucket_mib,
        "transport_share_of_raw_speed": raw / statistics.median(passages),
        "transfer_share_of_raw_speed": raw / statistics.median(transfers),
        "sync_share_of_raw_speed": raw / statistics.median(syncs),
        **two_engine_figures(found, len(os.sched_getaffinity(0))),
        "transfer_s_all": transfers,
        "sync_s_all": syncs,
        "two_engines_s_all": found[2].walls,
        "raw_s_all": before + after,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, value in result.items():
        if not name.endswith("_all"):
            print(f"{name:28} {value}")


if __name__ == "__main__":
    main()
