"""Builds this rank's part of the model, with random weights that do not depend on the layout."""

import hashlib

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_credit.mcore import cpu_mode
from megatron_credit.mcore.architecture import Architecture, padded_vocab_size
from megatron_credit.mcore.config import ParallelConfig
from megatron_credit.mcore.layer_spec import block_spec, uses_transformer_engine
from megatron_credit.mcore.names import global_name, is_vocabulary
from megatron_credit.mcore.parallel import virtual_stages
from megatron_credit.mcore.rotary import frequencies, score_scale
from megatron_credit.mcore.routing import take_over_routing
from megatron_credit.mcore.sharding import full_shape, is_experts, pad_rows, take_shard

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

_INITIAL_STD = 0.02


def build_model(
    architecture: Architecture,
    parallel: ParallelConfig,
    *,
    dtype: torch.dtype,
    seed: int | None,
    recompute: str = "none",
) -> list[GPTModel]:
    """This rank's chunks of the model, one per virtual stage, not wrapped for data parallelism.

    `start_parallel` must have run with the same `parallel`, and `check_parallel` accepted it.
    `seed`: weights are normal with standard deviation 0.02, norms 1, biases 0, each parameter drawn
    from `seed` and its global name, so that every layout holds the same model. None leaves weights
    for a Converter to load. Each chunk's `config` is the one TransformerConfig.
    """
    cpu_mode.require_device()
    config = transformer_config(architecture, parallel, dtype=dtype, recompute=recompute)
    stages = range(parallel.virtual_pipeline) if parallel.virtual_pipeline > 1 else (None,)
    chunks = [_build_chunk(architecture, parallel, config, stage) for stage in stages]
    for chunk in chunks:
        if torch.cuda.is_available():
            chunk.cuda()
        if seed is not None:
            _draw_weights(architecture, chunk, seed)
    return chunks


def transformer_config(
    architecture: Architecture, parallel: ParallelConfig, *, dtype: torch.dtype, recompute: str
) -> TransformerConfig:
    """Megatron's configuration of this model under this layout."""
    return TransformerConfig(
        **_architecture_options(architecture),
        **layout_options(parallel, dtype=dtype, recompute=recompute),
    )


def layout_options(
    parallel: ParallelConfig, *, dtype: torch.dtype, recompute: str
) -> dict[str, object]:
    """The fields of megatron's configuration that do not depend on the model.

    Losses are sums, and the caller divides by its own count (`calculate_per_token_loss`).
    """
    interleaved = parallel.virtual_pipeline > 1
    return {
        **_unfused(),
        **(_FULL_RECOMPUTE if recompute == "full" else {}),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # variable_seq_lengths refuses the other dispatcher even for dense models.
        "moe_token_dispatcher_type": "alltoall",
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": virtual_stages(parallel),
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
        "sequence_parallel": parallel.sequence_parallel,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "use_cpu_initialization": not torch.cuda.is_available(),
        # Packs of micro-batches differ in length.
        "variable_seq_lengths": parallel.pipeline > 1,
        # Interleaved stages must overlap: with two stages the batched form is ambiguous (previous
        # and next rank are one) and was seen to give wrong results on Gloo.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "calculate_per_token_loss": True,
    }


_FULL_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def _architecture_options(architecture: Architecture) -> dict[str, object]:
    options: dict[str, object] = {
        "num_layers": architecture.num_layers,
        "hidden_size": architecture.hidden_size,
        "ffn_hidden_size": architecture.ffn_size,
        "num_attention_heads": architecture.num_heads,
        "num_query_groups": architecture.num_kv_heads,
        "kv_channels": architecture.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": architecture.norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": architecture.qkv_bias,
        "qk_layernorm": architecture.qk_norm,
        "softmax_scale": score_scale(architecture),
    }
    if architecture.num_experts:
        options |= {
            "num_moe_experts": architecture.num_experts,
            "moe_router_topk": architecture.experts_per_token,
            "moe_ffn_hidden_size": architecture.expert_ffn_size,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            # bf16 logits would tie experts that differ.
            "moe_router_dtype": "fp32",
            # A softmax over the chosen ones alone is the softmax over all, scaled to add up to 1.
            "moe_router_pre_softmax": not architecture.weights_sum_to_one,
        }
    return options


def _unfused() -> dict[str, object]:
    """Fusions are CUDA kernels of Apex or Transformer Engine."""
    fused = uses_transformer_engine()
    return {
        "bias_activation_fusion": fused,
        "bias_dropout_fusion": fused,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": fused,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "attention_softmax_in_fp32": True,
    }


def _build_chunk(
    architecture: Architecture,
    parallel: ParallelConfig,
    config: TransformerConfig,
    stage: int | None,
) -> GPTModel:
    frequency_F = frequencies(architecture)
    chunk = GPTModel(
        config,
        block_spec(config, frequency_F=frequency_F, vp_stage=stage),
        vocab_size=padded_vocab_size(architecture, parallel.tensor),
        max_sequence_length=architecture.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        parallel_output=True,
        share_embeddings_and_output_weights=architecture.tied_embeddings,
        # Our own attention applies the rotary embedding itself.
        position_embedding_type="rope" if uses_transformer_engine() else "none",
        vp_stage=stage,
    )
    if uses_transformer_engine():
        # megatron itself knows one of the ways to stretch positions, with fixed constants.
        chunk.rotary_pos_emb.inv_freq.copy_(frequency_F)
    if architecture.num_experts:
        take_over_routing(chunk)
    return chunk


@torch.no_grad()
def _draw_weights(architecture: Architecture, chunk: GPTModel, seed: int) -> None:
    for local_name, parameter in chunk.named_parameters():
        name = global_name(architecture, chunk, local_name)
        rank, size = _place(name)
        shape = full_shape(parameter.shape, local_name, size)
        if is_vocabulary(name):
            # The padding depends on the layout, the drawn numbers must not.
            drawn = _draw(name, (architecture.vocab_size, *shape[1:]), seed)
            full = pad_rows(drawn, shape[0])
        else:
            full = _draw(name, shape, seed)
        parameter.copy_(take_shard(full, local_name, rank, size))


def _place(name: str) -> tuple[int, int]:
    """This process's rank among those that split parameter `name`, and their number."""
    if is_experts(name):
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )


def _draw(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    if name.endswith("bias"):
        return torch.zeros(shape)
    if name.endswith(("norm.weight", "norm_weight")):
        return torch.ones(shape)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randn(shape, generator=generator) * _INITIAL_STD
