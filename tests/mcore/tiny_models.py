"""Tiny Hugging Face checkpoints, all numbers random, and what transformers computes on them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

# Four layers: two stages of two virtual chunks. hidden / heads = 12 where head_dim is 16, and 131
# is odd, so that a mix-up of sizes cannot go unseen.
_SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 131,
}
_EXPERTS = {
    "head_dim": 16,
    "moe_intermediate_size": 20,
    "tie_word_embeddings": False,
}
_THETA = {"rope_type": "default", "rope_theta": 1_000_000.0}
# Windows far below the longest sequence of the tests, and factors that no rounding could hide.
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
_YARN = _THETA | {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8}
_CONFIGS = {
    "qwen3_tied": lambda: Qwen3Config(
        **_SIZES | {"vocab_size": 136},
        head_dim=16,
        tie_word_embeddings=True,
        rope_parameters=_THETA,
    ),
    "qwen3_odd_vocab": lambda: Qwen3Config(
        **_SIZES, head_dim=16, tie_word_embeddings=False, rope_parameters=_THETA
    ),
    "qwen2_bias": lambda: Qwen2Config(**_SIZES, tie_word_embeddings=True, rope_parameters=_THETA),
    "llama": lambda: LlamaConfig(**_SIZES, rms_norm_eps=1e-5, tie_word_embeddings=False),
    "llama3": lambda: LlamaConfig(
        **_SIZES | {"vocab_size": 132}, tie_word_embeddings=True, rope_parameters=_LLAMA3
    ),
    "qwen3_yarn": lambda: Qwen3Config(
        **_SIZES, head_dim=20, tie_word_embeddings=False, rope_parameters=_YARN
    ),
    "mistral_linear": lambda: MistralConfig(
        **_SIZES | {"vocab_size": 133},
        sliding_window=None,
        rope_parameters=_THETA | {"rope_type": "linear", "factor": 3.0},
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **_SIZES,
        **_EXPERTS,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        rope_parameters=_THETA,
    ),
    "qwen3_moe_shares": lambda: Qwen3MoeConfig(
        **_SIZES,
        **_EXPERTS,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=False,
        rope_parameters=_THETA,
    ),
}
KINDS = tuple(_CONFIGS)


def write_tiny_model(directory: Path, kind: str, *, seed: int = 0) -> Path:
    """A checkpoint of `kind` in `directory`/`kind`."""
    tiny_model(kind, seed=seed).save_pretrained(directory / kind)
    return directory / kind


def tiny_model(kind: str, *, seed: int = 0) -> Any:
    """A transformers model of `kind`: float32, norms and biases random too."""
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(_CONFIGS[kind](), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.copy_(1 + noise if "norm" in name else noise)
    return model


def published(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Named tensors of a transformers model under the names of published checkpoints, which have
    one tensor for each matrix of each expert."""
    for name, tensor in tensors:
        experts, _, part = name.rpartition(".")
        if not experts.endswith(".experts"):
            yield name, tensor
            continue
        for number, weight in enumerate(tensor):
            sides = zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True)
            for side, matrix in sides if part == "gate_up_proj" else [(part, weight)]:
                yield f"{experts}.{number}.{side}.weight", matrix


@contextmanager
def routed(model: Any, expert_LDK: Tensor) -> Iterator[None]:
    """Within, the routers of a transformers model take these experts; their own choice for -1."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    def forward(router: Any, hidden_LH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_LE, _, own_LK = choose(router, hidden_LH)
        told_LK = expert_LDK[:, layer_of[router]]
        expert_LK = torch.where(told_LK >= 0, told_LK, own_LK)
        weight_LK = logits_LE.softmax(-1).gather(-1, expert_LK)
        if router.norm_topk_prob:
            weight_LK = weight_LK / weight_LK.sum(-1, keepdim=True)
        return logits_LE, weight_LK, expert_LK

    choose = Qwen3MoeTopKRouter.forward
    layer_of = {layer.mlp.gate: number for number, layer in enumerate(model.model.layers)}
    Qwen3MoeTopKRouter.forward = forward
    try:
        yield
    finally:
        Qwen3MoeTopKRouter.forward = choose


def reference_logits(model_dir: Path, sequences: list[Tensor]) -> list[Tensor]:
    """Float32 logits [L, V] that transformers computes for each sequence of token ids [L] alone."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    with torch.no_grad():
        return [model(ids_L[None]).logits[0] for ids_L in sequences]
