"""What a config.json says of experts: read exactly, or refused by name."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from mcore import tiny_models

from megatron_credit.mcore.architecture import check_parallel, read_architecture
from megatron_credit.mcore.config import ParallelConfig

# As published for Qwen3-30B-A3B.
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def write_config(directory: Path, config: dict) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def without(*fields: str) -> dict:
    return {name: value for name, value in QWEN3_MOE.items() if name not in fields}


def test_published_config(tmp_path):
    found = read_architecture(write_config(tmp_path, QWEN3_MOE))
    assert (found.family, found.num_layers, found.qk_norm) == ("qwen3_moe", 48, True)
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (32, 4, 128)
    assert (found.num_experts, found.experts_per_token, found.expert_ffn_size) == (128, 8, 768)
    assert found.weights_sum_to_one


@pytest.mark.parametrize(
    ("kind", "experts"),
    [("qwen3_moe", (8, 3, 20, True)), ("qwen3_moe_shares", (4, 2, 20, False))],
)
def test_config_that_transformers_5_writes(tmp_path, kind, experts):
    path = tiny_models.write_tiny_model(tmp_path, kind)
    fields = json.loads((path / "config.json").read_text())
    assert "num_local_experts" in fields and "num_experts" not in fields
    found = read_architecture(path)
    assert experts == (
        found.num_experts,
        found.experts_per_token,
        found.expert_ffn_size,
        found.weights_sum_to_one,
    )


def test_weights_are_shares_where_nothing_is_said(tmp_path):
    assert not read_architecture(
        write_config(tmp_path, without("norm_topk_prob"))
    ).weights_sum_to_one


def test_the_weight_of_the_balancing_loss_makes_no_other_model(tmp_path):
    expected = read_architecture(write_config(tmp_path, QWEN3_MOE))
    changed = QWEN3_MOE | {"router_aux_loss_coef": 0.5, "output_router_logits": True}
    assert read_architecture(write_config(tmp_path, changed)) == expected


def test_one_expert_a_token_is_trained_by_its_share(tmp_path):
    single = QWEN3_MOE | {"num_experts_per_tok": 1, "norm_topk_prob": False}
    assert read_architecture(write_config(tmp_path, single)).experts_per_token == 1


REFUSED = {
    "dense layers": (QWEN3_MOE | {"mlp_only_layers": [0, 3]}, "mlp_only_layers is [0, 3]"),
    "every second": (QWEN3_MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
    "no number": (without("num_experts"), "num_experts is missing"),
    "two numbers": (QWEN3_MOE | {"num_local_experts": 64}, "num_local_experts contradict"),
    "no choice": (without("num_experts_per_tok"), "num_experts_per_tok is missing"),
    "too many": (QWEN3_MOE | {"num_experts_per_tok": 129}, "is 129, above num_experts=128"),
    "one of weight one": (
        QWEN3_MOE | {"num_experts_per_tok": 1},
        "is 1 with norm_topk_prob = true: every weight is 1, so the router cannot be trained",
    ),
    "no width": (without("moe_intermediate_size"), "moe_intermediate_size is missing"),
    "text": (QWEN3_MOE | {"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes'"),
    "shared experts": (
        QWEN3_MOE | {"shared_expert_intermediate_size": 512},
        "shared_expert_intermediate_size is 512",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_anything_else_is_refused_by_name(tmp_path, case):
    config, message = REFUSED[case]
    with pytest.raises(ValueError) as error:
        read_architecture(write_config(tmp_path, config))
    assert message in str(error.value)


def test_layouts_of_experts(tmp_path):
    model = read_architecture(write_config(tmp_path, QWEN3_MOE))
    layout = {"tensor": 4, "sequence_parallel": True, "expert": 8, "expert_tensor": 2}
    check_parallel(model, ParallelConfig(**layout), 16)
    with pytest.raises(ValueError, match="expert x expert_tensor=16 does not divide tensor"):
        check_parallel(model, ParallelConfig(**layout), 8)
    narrow = replace(model, expert_ffn_size=770)
    with pytest.raises(ValueError, match="expert_tensor=4 does not divide expert_ffn_size=770"):
        check_parallel(narrow, ParallelConfig(expert_tensor=4), 4)
    # The width of a dense feed-forward, which no layer has.
    check_parallel(replace(model, ffn_size=7), ParallelConfig(**layout), 16)
    dense = replace(model, num_experts=0)
    with pytest.raises(ValueError, match="expert_tensor=2, but the model has no experts; set"):
        check_parallel(dense, ParallelConfig(expert_tensor=2), 2)
