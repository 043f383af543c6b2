"""What a model is: read from a Hugging Face config.json, checked against a parallel layout.

Only what is computed exactly as the checkpoint's authors meant it is accepted. Light to import.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from megatron_credit.mcore.config import ConverterKind, ParallelConfig
from megatron_credit.mcore.config_file import ConfigFile
from megatron_credit.mcore.config_keys import (
    refuse_scaled_logits,
    refuse_sliding_window,
    refuse_unsupported,
)
from megatron_credit.mcore.rope_scaling import RopeScaling, max_positions, read_rope

Family = Literal["qwen3", "qwen3_moe", "qwen2", "llama", "mistral"]
FAMILIES: tuple[Family, ...] = ("qwen3", "qwen3_moe", "qwen2", "llama", "mistral")

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts in the configurations of several families."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes and switches of a dense or mixture-of-experts decoder with rotary positions, RMSNorm,
    grouped-query attention and a gated SiLU feed-forward."""

    family: str
    """`model_type`; where megatron-bridge builds the model, with a digest of its config.json."""
    num_layers: int
    hidden_size: int
    ffn_size: int
    """Width of a dense feed-forward between its matrices."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    """Longest sequence, in tokens, that the checkpoint declares."""
    rope_theta: float
    norm_eps: float
    tied_embeddings: bool
    """The output weight is the embedding."""
    qkv_bias: bool
    qk_norm: bool
    """RMSNorm over each query and key head."""
    num_experts: int = 0
    """Of every layer; 0: dense."""
    experts_per_token: int = 0
    expert_ffn_size: int = 0
    """Width of an expert between its matrices."""
    weights_sum_to_one: bool = False
    """The weights of a token's experts are scaled to add up to 1; else they are the shares of a
    softmax over all experts."""
    rope_scaling: RopeScaling | None = None
    """How positions beyond the first training's window are reached; None: no window was
    stretched."""

    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits that differ where any field differs."""
        fields = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(fields.encode()).hexdigest()[:16]


def read_architecture(model_dir: Path, converter: ConverterKind = "builtin") -> Architecture:
    """The architecture that `model_dir`/config.json describes.

    With converter "bridge" only the sizes count, see `_outline`. Else:
    ValueError names the file and the field: no such directory or file, a missing or mistyped field,
    or something that would be computed differently here (other families, sliding windows, quantised
    weights, biases the family does not usually have, keys that nobody here knows). A missing
    constant is the one that transformers takes for the family.
    """
    file = ConfigFile(model_dir)
    if converter == "bridge":
        return _outline(file)
    family = file.text("model_type")
    if family not in FAMILIES:
        raise file.refusal(
            "model_type",
            f"is {family!r}; supported model types: {', '.join(FAMILIES)} (others perhaps with "
            'policy.converter = "bridge")',
        )
    refuse_unsupported(file, family)
    rope_theta, rope_scaling = read_rope(file)
    heads = file.count("num_attention_heads")
    hidden = file.count("hidden_size")
    architecture = Architecture(
        family=family,
        num_layers=file.count("num_hidden_layers"),
        hidden_size=hidden,
        ffn_size=file.count("intermediate_size"),
        num_heads=heads,
        # Llama checkpoints of before grouped queries do not state it.
        num_kv_heads=file.count("num_key_value_heads", heads if family == "llama" else None),
        head_dim=_head_dim(file, family, hidden, heads),
        vocab_size=file.count("vocab_size"),
        max_positions=max_positions(file, rope_scaling),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        norm_eps=file.number("rms_norm_eps", 1e-6),
        tied_embeddings=file.switch("tie_word_embeddings", False),
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        **(_experts(file) if family == "qwen3_moe" else {}),
    )
    refuse_sliding_window(file, family, architecture.max_positions)
    _check_heads(file, architecture)
    return architecture


def _outline(file: ConfigFile) -> Architecture:
    """What is needed here of a model that megatron-bridge builds: its sizes. Switches and rotary
    positions are the bridge's business, and not those of the model."""
    refuse_scaled_logits(file)
    fields = json.dumps(file.fields, sort_keys=True)
    heads, hidden = file.count("num_attention_heads"), file.count("hidden_size")
    experts = [name for name in _EXPERT_COUNTS if file.has(name)]
    return Architecture(
        family=f"{file.text('model_type')} {hashlib.sha256(fields.encode()).hexdigest()[:16]}",
        num_layers=file.count("num_hidden_layers"),
        hidden_size=hidden,
        ffn_size=file.count("intermediate_size"),
        num_heads=heads,
        num_kv_heads=file.count("num_key_value_heads", heads),
        head_dim=file.count("head_dim", hidden // heads),
        vocab_size=file.count("vocab_size"),
        max_positions=file.count("max_position_embeddings"),
        rope_theta=1.0,
        norm_eps=1.0,
        tied_embeddings=file.switch("tie_word_embeddings", False),
        qkv_bias=False,
        qk_norm=False,
        num_experts=file.count(experts[0]) if experts else 0,
    )


def _head_dim(file: ConfigFile, family: str, hidden: int, heads: int) -> int:
    if family == "qwen3":
        return file.as_count("head_dim", file.fields.get("head_dim", 128))
    if not file.has("head_dim") and hidden % heads:
        raise file.refusal(
            "head_dim",
            f"is missing and hidden_size={hidden} is no multiple of num_attention_heads={heads}",
        )
    return file.count("head_dim", hidden // heads)


def _experts(file: ConfigFile) -> dict[str, int | bool]:
    """The fields of an Architecture that say what its experts are.

    `router_aux_loss_coef` and `output_router_logits` are not looked at: the first is the weight of
    a pre-training loss that evens out the experts' loads. It would pull the router away from what
    the rewards ask for, and it changes nothing of what the model computes.
    """
    _refuse_dense_layers(file)
    # transformers 5 writes num_local_experts, the published checkpoints have num_experts.
    names = [name for name in ("num_experts", "num_local_experts") if file.has(name)]
    num_experts = file.count(names[0] if names else "num_experts")
    if file.count(names[-1]) != num_experts:
        raise file.refusal("num_experts", "and num_local_experts contradict each other")
    per_token = file.count("num_experts_per_tok")
    if per_token > num_experts:
        problem = f"is {per_token}, above num_experts={num_experts}"
        raise file.refusal("num_experts_per_tok", problem)
    sum_to_one = file.switch("norm_topk_prob", False)
    if per_token == 1 and sum_to_one:
        raise file.refusal(
            "num_experts_per_tok",
            "is 1 with norm_topk_prob = true: every weight is 1, so the router cannot be trained",
        )
    return {
        "num_experts": num_experts,
        "experts_per_token": per_token,
        "expert_ffn_size": file.count("moe_intermediate_size"),
        "weights_sum_to_one": sum_to_one,
    }


def _refuse_dense_layers(file: ConfigFile) -> None:
    """Models that mix dense layers among those with experts."""
    step = file.fields.get("decoder_sparse_step", 1)
    if step != 1:
        raise file.refusal("decoder_sparse_step", f"is {step!r}, expected 1: experts in all layers")
    dense = file.fields.get("mlp_only_layers")
    if dense:
        raise file.refusal("mlp_only_layers", f"is {dense!r}, expected none: experts in all layers")


def _check_heads(file: ConfigFile, architecture: Architecture) -> None:
    heads, kv_heads = architecture.num_heads, architecture.num_kv_heads
    if heads % kv_heads:
        raise file.refusal(
            "num_key_value_heads",
            f"is {kv_heads}, which does not divide num_attention_heads={heads}",
        )
    if architecture.head_dim % 2:
        raise file.refusal(
            "head_dim", f"is {architecture.head_dim}; rotary positions need an even one"
        )


def padded_vocab_size(architecture: Architecture, tensor: int) -> int:
    """The vocabulary rounded up to a multiple of `tensor`, so that every tensor rank holds equally
    many rows. Rows from `vocab_size` on are padding: zero, never exported."""
    return -(-architecture.vocab_size // tensor) * tensor


def data_parallel_size(parallel: ParallelConfig, world_size: int) -> int:
    """Number of model replicas; ValueError where the world is no multiple of one replica."""
    replica = parallel.tensor * parallel.pipeline * parallel.context
    if world_size % replica:
        raise ValueError(
            f"{world_size} processes cannot hold whole replicas of tensor={parallel.tensor} x "
            f"pipeline={parallel.pipeline} x context={parallel.context} = {replica} processes; "
            f"start a multiple of {replica}"
        )
    return world_size // replica


def check_parallel(architecture: Architecture, parallel: ParallelConfig, world_size: int) -> None:
    """ValueError, with the formula and the valid values, where the model cannot be split so."""
    data = data_parallel_size(parallel, world_size)
    tensor = parallel.tensor
    _check_divides("tensor", tensor, "num_heads", architecture.num_heads)
    _check_divides("tensor", tensor, "num_kv_heads", architecture.num_kv_heads)
    if not architecture.num_experts:
        _check_divides("tensor", tensor, "ffn_size", architecture.ffn_size)
    _check_divides(
        "pipeline x virtual_pipeline",
        parallel.pipeline * parallel.virtual_pipeline,
        "num_layers",
        architecture.num_layers,
    )
    if parallel.sequence_parallel:
        _check_divides("tensor", tensor, "hidden_size", architecture.hidden_size)
    _check_experts(architecture, parallel, tensor * parallel.context * data)


def _check_experts(architecture: Architecture, parallel: ParallelConfig, ranks: int) -> None:
    split = parallel.expert_tensor
    if architecture.num_experts == 0:
        for name, size in (("expert", parallel.expert), ("expert_tensor", split)):
            if size > 1:
                raise ValueError(f"{name}={size}, but the model has no experts; set {name} = 1")
        return
    _check_divides("expert", parallel.expert, "num_experts", architecture.num_experts)
    _check_divides("expert_tensor", split, "expert_ffn_size", architecture.expert_ffn_size)
    _check_divides(
        "expert x expert_tensor", parallel.expert * split, "tensor x context x data", ranks
    )
    if parallel.tensor > 1 and not parallel.sequence_parallel:
        raise ValueError(
            f"tensor={parallel.tensor} with experts needs sequence_parallel = true, got false"
        )


def _check_divides(axis: str, size: int, name: str, total: int) -> None:
    if total % size:
        valid = [number for number in range(1, total + 1) if total % number == 0]
        raise ValueError(
            f"{axis}={size} does not divide {name}={total}; use one of {_abridged(valid)}"
        )


def _abridged(numbers: list[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:12])
    return shown + (", ..." if len(numbers) > 12 else "")
