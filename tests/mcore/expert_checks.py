"""A mixture-of-experts model under expert parallelism: same weights by name, same logits."""

import hashlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

# Expert parallel ranks come out of data (ep2, ep4) or tensor ranks (ep2_tp2_sp).
LAYOUTS: dict[str, dict[str, Any]] = {
    "ep1": {},
    "ep2": {"expert": 2},
    "ep4": {"expert": 4},
    "ep2_tp2_sp": {"expert": 2, "tensor": 2, "sequence_parallel": True},
    "ep2_pp2": {"expert": 2, "pipeline": 2},
}


def run() -> dict[str, dict[str, Any]]:
    """Per layout: a digest of every parameter that this rank holds, by global name, and the largest
    difference of the logits from those without expert parallelism (-1 off the last stage)."""
    results = {}
    expected = None
    for layout, options in LAYOUTS.items():
        digests, logits = _one_layout(options)
        expected = logits if expected is None else expected
        error = -1.0 if logits is None else (logits - expected).abs().max().item()
        results[f"experts/{layout}"] = {"digests": digests, "error": error}
    return results


def _one_layout(options: dict[str, Any]) -> tuple[dict[str, str], Tensor | None]:
    from megatron_credit.mcore import parallel
    from megatron_credit.mcore.architecture import Architecture, check_parallel
    from megatron_credit.mcore.config import ParallelConfig
    from megatron_credit.mcore.convert import Converter
    from megatron_credit.mcore.model import build_model

    architecture = Architecture(
        family="qwen3",
        num_layers=2,
        hidden_size=32,
        ffn_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=30,
        max_positions=32,
        rope_theta=10_000.0,
        norm_eps=1e-6,
        tied_embeddings=False,
        qkv_bias=False,
        qk_norm=True,
        num_experts=4,
        experts_per_token=2,
        expert_ffn_size=24,
    )
    config = ParallelConfig(**options)
    check_parallel(architecture, config, dist.get_world_size())
    ranks = parallel.start_parallel(config, seed=1, timeout_s=120)
    chunks = build_model(architecture, config, dtype=torch.float32, seed=5)
    with pytest.raises(ValueError, match="num_experts=4; only dense models can be converted"):
        Converter(architecture, chunks, ranks)
    digests = _digests(architecture, chunks, ranks)
    logits = _logits(chunks, ranks)
    parallel.stop_parallel(keep_world=True)
    return digests, logits


def _digests(architecture: Any, chunks: list[Any], ranks: Any) -> dict[str, str]:
    from megatron_credit.mcore.names import global_name
    from megatron_credit.mcore.sharding import join_shards, split_dimension

    digests = {}
    for chunk in chunks:
        for local_name, parameter in chunk.named_parameters():
            shards = [parameter.detach()]
            if ranks.tp_size > 1 and split_dimension(local_name) is not None:
                shards = [torch.empty_like(shards[0]) for _ in range(ranks.tp_size)]
                dist.all_gather(shards, parameter.detach(), group=ranks.tp_group)
            full = join_shards(shards, local_name).contiguous()
            name = global_name(architecture, chunk, local_name)
            digests[name] = hashlib.sha256(full.numpy().tobytes()).hexdigest()
    return digests


def _logits(chunks: list[Any], ranks: Any) -> Tensor | None:
    from mcore.convert_worker import forward_logits

    ids_BL = torch.arange(2 * 12).view(2, 12) % 29
    position_BL = torch.arange(12).expand(2, -1)
    return forward_logits(chunks, ranks, ids_BL, position_BL, None)
