"""Tiny Hugging Face checkpoints, all numbers random, and what transformers computes on them."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

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
_THETA = {"rope_type": "default", "rope_theta": 1_000_000.0}
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
}
KINDS = tuple(_CONFIGS)


def write_tiny_model(directory: Path, kind: str, *, seed: int = 0) -> Path:
    """A checkpoint of `kind` in `directory`/`kind`: float32, norms and biases random too."""
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(_CONFIGS[kind](), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.copy_(1 + noise if "norm" in name else noise)
    model.save_pretrained(directory / kind)
    return directory / kind


def reference_logits(model_dir: Path, sequences: list[Tensor]) -> list[Tensor]:
    """Float32 logits [L, V] that transformers computes for each sequence of token ids [L] alone."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    with torch.no_grad():
        return [model(ids_L[None]).logits[0] for ids_L in sequences]
