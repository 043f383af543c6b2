"""Configurations as they are published, abridged: read as transformers reads them, or refused."""

import json

import pytest
from transformers import AutoConfig

from megatron_credit.mcore.architecture import read_architecture

LLAMA2 = {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
LLAMA1 = {
    name: value
    for name, value in LLAMA2.items()
    if name not in ("num_key_value_heads", "rope_scaling", "tie_word_embeddings", "pretraining_tp")
} | {"max_sequence_length": 2048, "max_position_embeddings": 2048, "pad_token_id": 0}
LLAMA3 = LLAMA2 | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
STRETCH = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA31 = LLAMA3 | {
    "eos_token_id": [128001, 128008, 128009],
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "rope_scaling": STRETCH,
}
LLAMA32 = LLAMA31 | {
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "rope_scaling": STRETCH | {"factor": 32.0},
    "tie_word_embeddings": True,
}
MISTRAL = LLAMA2 | {
    "architectures": ["MistralForCausalLM"],
    "attention_dropout": 0.0,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_key_value_heads": 8,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
}
del MISTRAL["pretraining_tp"]
MISTRAL3 = MISTRAL | {"rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32768}
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
QWEN3 = QWEN2 | {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "sliding_window": None,
    "tie_word_embeddings": True,
}
MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
# As transformers 5 writes one: rotary positions in their new place, one kind a layer.
QWEN3_NEW = {name: value for name, value in QWEN3.items() if name != "rope_theta"} | {
    "dtype": "float32",
    "layer_types": ["full_attention"] * 28,
    "pad_token_id": None,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "rope_scaling": None,
}

ACCEPTED = {
    "Llama 1": LLAMA1,
    "Llama 2 7B": LLAMA2,
    "CodeLlama": LLAMA1 | {"rope_theta": 1e6, "max_position_embeddings": 16384},
    "Vicuna 16k": LLAMA2 | {"rope_scaling": {"factor": 4.0, "type": "linear"}},
    "DeepSeek Coder": LLAMA2
    | {"rope_theta": 100000, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "TinyLlama": LLAMA2 | {"hidden_size": 2048, "num_key_value_heads": 4, "num_hidden_layers": 22},
    "Yi": LLAMA2 | {"num_key_value_heads": 4, "rope_theta": 5000000.0, "vocab_size": 64000},
    "Llama 3": LLAMA3,
    "Llama 3 by Unsloth": LLAMA3 | {"unsloth_fixed": True, "unsloth_version": "2024.9"},
    "Llama 3, a million tokens": LLAMA3 | {"rope_theta": 3580165449.0},
    "Llama 3.1": LLAMA31,
    "Llama 3.2 1B": LLAMA32,
    "Llama 3.3 70B": LLAMA31 | {"hidden_size": 8192, "num_attention_heads": 64},
    "Falcon 3": LLAMA3
    | {"head_dim": 256, "hidden_size": 3072, "num_attention_heads": 12, "num_key_value_heads": 4},
    "SmolLM2": LLAMA2
    | {
        "hidden_size": 576,
        "is_llama_config": True,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rope_interleaved": False,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    },
    "Mistral 0.3": MISTRAL3,
    "Mistral Nemo": MISTRAL3 | {"head_dim": 128, "hidden_size": 5120},
    "Mistral, shorter than its window": MISTRAL | {"max_position_embeddings": 4096},
    "Qwen 1.5": QWEN2 | {"sliding_window": 32768, "max_window_layers": 21},
    "Qwen 2.5": QWEN2,
    "Qwen 2.5, biases declared": QWEN2 | {"attention_bias": True},
    "Qwen 2.5 with YaRN": QWEN2 | {"rope_scaling": YARN},
    "Qwen 2.5 with YaRN and its length": QWEN2
    | {"rope_scaling": YARN, "max_position_embeddings": 131072},
    "R1 Distill Qwen": QWEN2 | {"sliding_window": 4096, "use_mrope": False},
    "Qwen 2, no layer slides": QWEN2 | {"use_sliding_window": True, "sliding_window": 4096},
    "Qwen 2, no window": QWEN2 | {"use_sliding_window": True, "sliding_window": None},
    "Qwen 2, wide window": QWEN2 | {"use_sliding_window": True, "max_window_layers": 0},
    "Qwen 3": QWEN3,
    "Qwen 3 with YaRN": QWEN3 | {"rope_scaling": YARN, "max_position_embeddings": 131072},
    "Qwen 3 of transformers 5": QWEN3_NEW,
    "Qwen 3 MoE": MOE,
}

SLIDES = {"use_sliding_window": True, "sliding_window": 4096}
REFUSED = {
    "Llama 1 by its first converter": (
        LLAMA1 | {"architectures": ["LLaMAForCausalLM"]},
        "architectures",
    ),
    "Yarn-Llama": (
        LLAMA2
        | {
            "auto_map": {"AutoModelForCausalLM": "modeling_llama_together_yarn.LlamaForCausalLM"},
            "rope_scaling": {"factor": 16.0, "finetuned": True, "type": "yarn"},
        },
        "auto_map",
    ),
    "dynamic NTK": (LLAMA2 | {"rope_scaling": {"factor": 8.0, "type": "dynamic"}}, "rope_scaling"),
    "LongRoPE": (LLAMA2 | {"rope_scaling": {"type": "su", "long_factor": [1.0]}}, "rope_scaling"),
    "GPTQ": (LLAMA2 | {"quantization_config": {"bits": 4}}, "quantization_config"),
    "FP8": (QWEN3 | {"quantization_config": {"fmt": "e4m3"}}, "quantization_config"),
    "reward model": (
        LLAMA31 | {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1},
        "architectures",
    ),
    "process reward model": (
        QWEN2 | {"architectures": ["Qwen2ForProcessRewardModel"]},
        "architectures",
    ),
    "InternLM as Llama": (LLAMA2 | {"attention_bias": True}, "attention_bias"),
    "another InternLM": (LLAMA2 | {"bias": True}, "bias"),
    "Llama with biases": (LLAMA3 | {"mlp_bias": True}, "mlp_bias"),
    "Granite as Llama": (LLAMA3 | {"residual_multiplier": 0.22}, "residual_multiplier"),
    "Granite as Llama, all": (LLAMA3 | {"attention_multiplier": 0.015625}, "attention_multiplier"),
    "SmolLM3 as Llama": (LLAMA3 | {"no_rope_layers": [1, 1, 1, 0] * 8}, "no_rope_layers"),
    "capped": (LLAMA3 | {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    "partly rotated": (LLAMA3 | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "by its old name": (LLAMA3 | {"rotary_pct": 0.25}, "rotary_pct"),
    "interleaved": (LLAMA3 | {"rope_interleaved": True}, "rope_interleaved"),
    "ReLU": (LLAMA2 | {"hidden_act": "relu"}, "hidden_act"),
    "Mistral 0.1": (MISTRAL, "sliding_window"),
    "Mistral, window left out": (
        {name: value for name, value in MISTRAL.items() if name != "sliding_window"},
        "sliding_window",
    ),
    "Qwen 2, seven layers slide": (QWEN2 | SLIDES | {"max_window_layers": 21}, "sliding_window"),
    "Qwen 2, half of the layers": (
        QWEN2 | SLIDES | {"layer_types": ["full_attention", "sliding_attention"] * 14},
        "layer_types",
    ),
    "Qwen 2.5 1M": (
        QWEN2 | {"dual_chunk_attention_config": {"chunk_size": 262144}},
        "dual_chunk_attention_config",
    ),
    "gte-Qwen2": (QWEN2 | {"is_causal": False}, "is_causal"),
    "mrope": (
        QWEN2 | {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
        "rope_scaling",
    ),
    "Qwen 3 with biases": (QWEN3 | {"attention_bias": True}, "attention_bias"),
    "Qwen 3 of transformers 5, sliding": (
        QWEN3_NEW | {"layer_types": ["sliding_attention"] * 28},
        "layer_types",
    ),
    "Qwen 3 with experts": (QWEN3 | {"num_experts": 128}, "num_experts"),
    "Qwen 3 MoE, sliding": (MOE | SLIDES, "sliding_window"),
    **{
        family: (LLAMA3 | {"model_type": family}, "model_type")
        for family in ("gemma2", "phi3", "granite", "smollm3", "mixtral", "olmo2", "cohere", "glm4")
    },
}


def written(directory, config):
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("name", ACCEPTED)
def test_read_as_transformers_reads_it(tmp_path, name):
    found = read_architecture(written(tmp_path, ACCEPTED[name]))
    truth = AutoConfig.from_pretrained(tmp_path)
    assert found.num_kv_heads == truth.num_key_value_heads
    head_dim = truth.to_dict().get("head_dim") or truth.hidden_size // truth.num_attention_heads
    assert found.head_dim == head_dim
    assert found.norm_eps == truth.rms_norm_eps
    assert found.tied_embeddings == truth.tie_word_embeddings
    assert found.rope_theta == truth.rope_parameters["rope_theta"]
    assert (found.rope_scaling is None) == (truth.rope_parameters["rope_type"] == "default")
    kinds = truth.to_dict().get("layer_types") or ()
    window = truth.to_dict().get("sliding_window") or found.max_positions
    assert window >= found.max_positions or set(kinds) == {"full_attention"}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_the_field_that_matters(tmp_path, name):
    config, field = REFUSED[name]
    with pytest.raises(ValueError) as error:
        read_architecture(written(tmp_path, config))
    assert str(error.value).startswith(f"{tmp_path / 'config.json'}: {field} ")
