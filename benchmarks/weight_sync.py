"""Weight sync to a real vLLM server against a raw Gloo broadcast of the same bytes, on CPUs.

    OMP_NUM_THREADS=1 python benchmarks/weight_sync.py [--repeats 9] [--out FILE]

A 10 M-parameter model in float32. `transport` packs, broadcasts and unpacks between two processes,
as the sync does. `transfer` is that to a vLLM server, until it has loaded the last tensor; `sync`
adds the control calls around it (vLLM sleeps 20 ms in its pause), the repacking of the layers and
the reset of the prefix cache.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from datetime import date
from pathlib import Path

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


def ten_million() -> Qwen3ForCausalLM:
    """A model of 10 M parameters."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=8192,
            hidden_size=256,
            intermediate_size=1024,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            eos_token_id=1,
            pad_token_id=0,
        )
    ).float()


def engine_syncs(
    model: Qwen3ForCausalLM, path: Path, config: EngineConfig, repeats: int
) -> tuple[list, list]:
    """Seconds of each transfer and of each whole sync."""
    model.save_pretrained(path / "model")
    log = path / "engine.log"
    server = EngineServer.start(path / "model", config, log_path=log, seed=0)
    try:
        server.wait_ready(300)
        client = EngineClient(
            server.address, request_timeout_s=60, log_path=log, api_key=server.api_key
        )
        sync = WeightSync([client], config)
        sender = sync._sender = TimedSender([client], config)
        weights = [(n, p) for n, p in model.named_parameters() if n != "lm_head.weight"]
        pieces = [Piece(name, p.dtype, tuple(p.shape)) for name, p in weights]
        transfers, syncs = [], []
        for version in range(repeats + 1):
            start = time.perf_counter()
            sync.send(pieces, iter(weights), version=version)
            syncs.append(time.perf_counter() - start)
            transfers.append(sender.transfer_s)
        return transfers[1:], syncs[1:]  # the first one connects
    finally:
        server.stop()


def main() -> None:
    """Measures both in one run and prints the ratio of medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--bucket-mib", type=int, default=DEFAULT_BUCKET_MIB)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/weight_sync_cpu.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = CONFIG.model_copy(update={"bucket_mib": arguments.bucket_mib})
    model = ten_million()
    num_bytes = sum(p.nbytes for p in model.parameters())
    with tempfile.TemporaryDirectory() as path:
        before = raw_broadcast(num_bytes, arguments.repeats)
        weights = [(n, p) for n, p in model.named_parameters() if n != "lm_head.weight"]
        pieces = [Piece(name, p.dtype, tuple(p.shape)) for name, p in weights]
        passages = transport(weights, pieces, config.bucket_mib << 20, arguments.repeats)
        transfers, syncs = engine_syncs(model, Path(path), config, arguments.repeats)
        after = raw_broadcast(num_bytes, arguments.repeats)
    raw = statistics.median(before + after)
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
        "transfer_s_all": transfers,
        "sync_s_all": syncs,
        "raw_s_all": before + after,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, value in result.items():
        if not name.endswith("_all"):
            print(f"{name:28} {value}")


if __name__ == "__main__":
    main()
