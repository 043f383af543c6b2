"""Which modules a transformer block is made of: Transformer Engine's where it is installed, else
megatron's own linear layers with our norm and attention."""

import dataclasses
import functools

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.attention import CoreAttentionBuilder
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_credit.mcore.layers import RMSNorm, RotaryAttention


def uses_transformer_engine() -> bool:
    """Whether blocks are built of Transformer Engine's modules. They fuse each norm into the linear
    layer that follows and megatron applies the rotary embedding, in our own blocks the attention
    does."""
    return HAVE_TE


def block_spec(
    config: TransformerConfig, *, frequency_F: Tensor, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """The layers of this rank's chunk `vp_stage` (None: plain pipeline), whose rotary embedding
    turns by `frequency_F` radians a token, [half a head].

    The Transformer Engine path needs a GPU; it has not been run where this was written.
    """
    transformer_engine = uses_transformer_engine()
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=transformer_engine,
        normalization="RMSNorm",
        qk_l2_norm=False,
        vp_stage=vp_stage,
    )
    if transformer_engine:
        return block
    attention = functools.partial(RotaryAttention, frequency_F=frequency_F)
    layers = [_own_layer(layer, config, attention) for layer in block.layer_specs]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _own_layer(
    layer: ModuleSpec, config: TransformerConfig, core_attention: CoreAttentionBuilder
) -> ModuleSpec:
    attention = layer.submodules.self_attention
    norms = {"q_layernorm": RMSNorm, "k_layernorm": RMSNorm} if config.qk_layernorm else {}
    parts = dataclasses.replace(attention.submodules, core_attention=core_attention, **norms)
    submodules = dataclasses.replace(
        layer.submodules,
        input_layernorm=RMSNorm,
        pre_mlp_layernorm=RMSNorm,
        self_attention=dataclasses.replace(attention, submodules=parts),
    )
    return dataclasses.replace(layer, submodules=submodules)
