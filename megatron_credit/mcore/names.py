"""What each parameter is called: locally in a megatron chunk, globally, and at Hugging Face.

Axes of a shape, one letter each: V vocabulary, H hidden, Q all query heads (heads x head size),
K all key-value heads, D head size, F feed-forward, E experts, I an expert's feed-forward.
"""

import re
from dataclasses import dataclass
from typing import Literal

from megatron.core.models.gpt import GPTModel

from megatron_credit.mcore.architecture import Architecture

Layout = Literal["same", "vocab", "qkv", "gate_up"]


@dataclass(frozen=True)
class Rule:
    """One megatron parameter and the Hugging Face tensors it is made of. `{layer}` and `{expert}`
    stand for their numbers."""

    megatron: tuple[str, ...]
    """Global names: in our blocks first, then in Transformer Engine's where that one differs."""
    hugging_face: tuple[tuple[str, str], ...]
    """(name, axes) of each tensor."""
    layout: Layout = "same"
    """same: one tensor. vocab: one, with padding rows. qkv: query, key and value, interleaved by
    key-value head. gate_up: two, one after the other."""


_LAYER = "decoder.layers.{layer}."
_HF_LAYER = "model.layers.{layer}."

EMBEDDING = Rule(
    ("embedding.word_embeddings.weight",), (("model.embed_tokens.weight", "VH"),), "vocab"
)
ATTENTION_RULES = (
    Rule(
        (
            _LAYER + "input_layernorm.weight",
            _LAYER + "self_attention.linear_qkv.layer_norm_weight",
        ),
        ((_HF_LAYER + "input_layernorm.weight", "H"),),
    ),
    Rule(
        (_LAYER + "self_attention.linear_qkv.weight",),
        (
            (_HF_LAYER + "self_attn.q_proj.weight", "QH"),
            (_HF_LAYER + "self_attn.k_proj.weight", "KH"),
            (_HF_LAYER + "self_attn.v_proj.weight", "KH"),
        ),
        "qkv",
    ),
    Rule(
        (_LAYER + "self_attention.linear_qkv.bias",),
        (
            (_HF_LAYER + "self_attn.q_proj.bias", "Q"),
            (_HF_LAYER + "self_attn.k_proj.bias", "K"),
            (_HF_LAYER + "self_attn.v_proj.bias", "K"),
        ),
        "qkv",
    ),
    Rule(
        (_LAYER + "self_attention.q_layernorm.weight",),
        ((_HF_LAYER + "self_attn.q_norm.weight", "D"),),
    ),
    Rule(
        (_LAYER + "self_attention.k_layernorm.weight",),
        ((_HF_LAYER + "self_attn.k_norm.weight", "D"),),
    ),
    Rule(
        (_LAYER + "self_attention.linear_proj.weight",),
        ((_HF_LAYER + "self_attn.o_proj.weight", "HQ"),),
    ),
)
DENSE_RULES = (
    Rule(
        (_LAYER + "pre_mlp_layernorm.weight", _LAYER + "mlp.linear_fc1.layer_norm_weight"),
        ((_HF_LAYER + "post_attention_layernorm.weight", "H"),),
    ),
    Rule(
        (_LAYER + "mlp.linear_fc1.weight",),
        (
            (_HF_LAYER + "mlp.gate_proj.weight", "FH"),
            (_HF_LAYER + "mlp.up_proj.weight", "FH"),
        ),
        "gate_up",
    ),
    Rule(
        (_LAYER + "mlp.linear_fc2.weight",),
        ((_HF_LAYER + "mlp.down_proj.weight", "HF"),),
    ),
)
ROUTER_RULES = (
    Rule(
        (_LAYER + "pre_mlp_layernorm.weight",),
        ((_HF_LAYER + "post_attention_layernorm.weight", "H"),),
    ),
    Rule((_LAYER + "mlp.router.weight",), ((_HF_LAYER + "mlp.gate.weight", "EH"),)),
)
EXPERT_RULES = (
    Rule(
        (_LAYER + "mlp.experts.local_experts.{expert}.linear_fc1.weight",),
        (
            (_HF_LAYER + "mlp.experts.{expert}.gate_proj.weight", "IH"),
            (_HF_LAYER + "mlp.experts.{expert}.up_proj.weight", "IH"),
        ),
        "gate_up",
    ),
    Rule(
        (_LAYER + "mlp.experts.local_experts.{expert}.linear_fc2.weight",),
        ((_HF_LAYER + "mlp.experts.{expert}.down_proj.weight", "HI"),),
    ),
)
FINAL_NORM = Rule(("decoder.final_layernorm.weight",), (("model.norm.weight", "H"),))
OUTPUT = Rule(("output_layer.weight",), (("lm_head.weight", "VH"),), "vocab")


def layer_rules(architecture: Architecture) -> list[Rule]:
    """The rules of the parameters that a layer of this architecture has, those of its experts
    apart."""
    absent = set()
    if not architecture.qkv_bias:
        absent |= {_LAYER + "self_attention.linear_qkv.bias"}
    if not architecture.qk_norm:
        absent |= {_LAYER + f"self_attention.{side}_layernorm.weight" for side in "qk"}
    rules = ATTENTION_RULES + (ROUTER_RULES if architecture.num_experts else DENSE_RULES)
    return [rule for rule in rules if rule.megatron[0] not in absent]


def axis_sizes(architecture: Architecture) -> dict[str, int]:
    """Size of each axis letter."""
    return {
        "V": architecture.vocab_size,
        "H": architecture.hidden_size,
        "Q": architecture.num_heads * architecture.head_dim,
        "K": architecture.num_kv_heads * architecture.head_dim,
        "D": architecture.head_dim,
        "F": architecture.ffn_size,
        "E": architecture.num_experts,
        "I": architecture.expert_ffn_size,
    }


def global_name(architecture: Architecture, chunk: GPTModel, local_name: str) -> str:
    """The layout-independent name of parameter `local_name` of `chunk`: layers and experts numbered
    over the whole model; the last stage's copy of a tied embedding has the embedding's name."""
    if local_name == OUTPUT.megatron[0] and architecture.tied_embeddings:
        return EMBEDDING.megatron[0]
    match = re.match(r"decoder\.layers\.(\d+)\.(.*)", local_name)
    if match is None:
        return local_name
    # megatron numbers layers from 1, over the whole model.
    layer = chunk.decoder.layers[int(match[1])]
    rest = re.sub(
        r"(local_experts)\.(\d+)",
        lambda expert: f"{expert[1]}.{layer.mlp.local_expert_indices[int(expert[2])]}",
        match[2],
    )
    return f"decoder.layers.{layer.layer_number - 1}.{rest}"


def is_vocabulary(name: str) -> bool:
    """Whether parameter `name` has one row per token id, and padding rows."""
    return name in (*EMBEDDING.megatron, *OUTPUT.megatron)
