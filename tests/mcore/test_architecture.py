"""config.json read exactly or refused, and layouts refused with what would be valid."""

import dataclasses
import json
from pathlib import Path

import pytest
from mcore import tiny_models

from megatron_credit.mcore.architecture import (
    Architecture,
    check_parallel,
    data_parallel_size,
    padded_vocab_size,
    read_architecture,
)
from megatron_credit.mcore.config import ParallelConfig

# As published for a checkpoint of before transformers 5: rope_theta at the top level, and a window
# size that is not in use.
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA = QWEN2 | {"model_type": "llama", "sliding_window": None}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}


def write_config(directory: Path, config: dict) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def without(field: str) -> dict:
    return {name: value for name, value in QWEN2.items() if name != field}


def test_published_qwen2_config(tmp_path):
    assert read_architecture(write_config(tmp_path, QWEN2)) == Architecture(
        family="qwen2",
        num_layers=24,
        hidden_size=896,
        ffn_size=4864,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        vocab_size=151936,
        max_positions=32768,
        rope_theta=1_000_000.0,
        norm_eps=1e-6,
        tied_embeddings=True,
        qkv_bias=True,
        qk_norm=False,
    )


def test_config_that_transformers_5_writes(tmp_path):
    path = tiny_models.write_tiny_model(tmp_path, "qwen3_odd_vocab")
    assert "rope_theta" not in json.loads((path / "config.json").read_text())
    assert read_architecture(path) == Architecture(
        family="qwen3",
        num_layers=4,
        hidden_size=48,
        ffn_size=80,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=131,
        max_positions=64,
        rope_theta=1_000_000.0,
        norm_eps=1e-6,
        tied_embeddings=False,
        qkv_bias=False,
        qk_norm=True,
    )


def test_llama_has_neither_bias_nor_head_norms(tmp_path):
    llama = read_architecture(write_config(tmp_path, LLAMA))
    assert (llama.family, llama.qkv_bias, llama.qk_norm) == ("llama", False, False)


def test_rope_parameters_win_over_the_old_place(tmp_path):
    config = QWEN2 | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    assert read_architecture(write_config(tmp_path, config)).rope_theta == 500.0


REFUSED = {
    "family": (QWEN2 | {"model_type": "gemma3"}, ["model_type is 'gemma3'", "qwen3, qwen2, llama"]),
    "experts": (QWEN2 | {"model_type": "qwen3_moe"}, ["model_type is 'qwen3_moe'"]),
    "missing": (without("rms_norm_eps"), ["rms_norm_eps is missing"]),
    "null": (QWEN2 | {"vocab_size": None}, ["vocab_size is missing"]),
    "no theta": (without("rope_theta"), ["rope_theta is missing"]),
    "no tie": (without("tie_word_embeddings"), ["tie_word_embeddings is missing"]),
    "text size": (QWEN2 | {"hidden_size": "896"}, ["hidden_size is '896'", "positive whole"]),
    "zero": (QWEN2 | {"num_hidden_layers": 0}, ["num_hidden_layers is 0", "positive whole"]),
    "true size": (QWEN2 | {"vocab_size": True}, ["vocab_size is True", "positive whole"]),
    "negative eps": (QWEN2 | {"rms_norm_eps": -1}, ["rms_norm_eps is -1", "positive number"]),
    "window": (QWEN2 | {"use_sliding_window": True}, ["use_sliding_window", "full attention"]),
    "llama window": (LLAMA | {"sliding_window": 128}, ["sliding_window", "full attention"]),
    "layer types": (
        QWEN2 | {"layer_types": ["full_attention", "sliding_attention"]},
        ["layer_types", "only full_attention"],
    ),
    "scaling": (QWEN2 | {"rope_scaling": YARN}, ["rope_scaling has type 'yarn'"]),
    "scaling 5": (QWEN2 | {"rope_parameters": YARN}, ["rope_parameters has type 'yarn'"]),
    "old scaling": (
        QWEN2 | {"rope_scaling": {"type": "linear", "factor": 2.0}},
        ["rope_scaling has type 'linear'"],
    ),
    "unknown rope": (
        QWEN2 | {"rope_parameters": {"rope_theta": 1e6, "short_factor": [1.0]}},
        ["rope_parameters has ['short_factor']"],
    ),
    "partial rope": (QWEN2 | {"partial_rotary_factor": 0.5}, ["partial_rotary_factor is 0.5"]),
    "quantised": (
        QWEN2 | {"quantization_config": {"quant_method": "fp8"}},
        ["quantization_config is set", "unquantised"],
    ),
    "activation": (QWEN2 | {"hidden_act": "gelu"}, ["hidden_act is 'gelu'", "'silu'"]),
    "bias": (LLAMA | {"attention_bias": True}, ["attention_bias is true", "llama"]),
    "mlp bias": (LLAMA | {"mlp_bias": True}, ["mlp_bias is true", "llama"]),
    "kv heads": (QWEN2 | {"num_key_value_heads": 4}, ["num_key_value_heads is 4", "=14"]),
    "head_dim": (QWEN2 | {"hidden_size": 900}, ["head_dim is missing", "=900", "=14"]),
    "odd head": (QWEN2 | {"head_dim": 63}, ["head_dim is 63", "even"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_file_and_field(tmp_path, case):
    config, parts = REFUSED[case]
    with pytest.raises(ValueError) as error:
        read_architecture(write_config(tmp_path, config))
    for part in [str(tmp_path / "config.json"), *parts]:
        assert part in str(error.value)


def test_not_a_model_directory(tmp_path):
    with pytest.raises(ValueError, match="nowhere is not a directory"):
        read_architecture(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds list, expected an object"):
        read_architecture(tmp_path)


MODEL = Architecture(
    family="qwen3",
    num_layers=12,
    hidden_size=60,
    ffn_size=96,
    num_heads=12,
    num_kv_heads=4,
    head_dim=8,
    vocab_size=131,
    max_positions=64,
    rope_theta=1e6,
    norm_eps=1e-6,
    tied_embeddings=True,
    qkv_bias=False,
    qk_norm=True,
)
EXPERTS = dataclasses.replace(MODEL, num_experts=6, experts_per_token=2, expert_ffn_size=16)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Architecture)])
def test_fingerprint_tells_any_two_models_apart(field):
    value = vars(MODEL)[field]
    other = "llama" if field == "family" else not value if value is True else value + 1
    changed = dataclasses.replace(MODEL, **{field: other})
    assert changed.fingerprint() != MODEL.fingerprint()
    assert MODEL.fingerprint() == dataclasses.replace(changed, **{field: value}).fingerprint()


@pytest.mark.parametrize(("tensor", "rows"), [(1, 131), (2, 132), (4, 132), (8, 136), (131, 131)])
def test_padded_vocabulary_gives_equal_shards(tensor, rows):
    assert padded_vocab_size(MODEL, tensor) == rows


def test_data_parallel_size():
    layout = ParallelConfig(tensor=2, pipeline=3, context=2)
    assert data_parallel_size(layout, 24) == 2
    with pytest.raises(ValueError, match=r"13 processes .* = 12 processes; start a multiple of 12"):
        data_parallel_size(layout, 13)


GOOD = {
    "all axes": (MODEL, {"tensor": 4, "pipeline": 2, "virtual_pipeline": 3, "context": 2}, 32),
    "experts": (EXPERTS, {"expert": 3}, 6),
    "experts over tensor ranks": (
        EXPERTS,
        {"expert": 2, "tensor": 2, "sequence_parallel": True},
        2,
    ),
}


@pytest.mark.parametrize("case", GOOD)
def test_layout_is_accepted(case):
    model, layout, world_size = GOOD[case]
    check_parallel(model, ParallelConfig(**layout), world_size)


BAD = {
    "heads": (
        MODEL,
        {"tensor": 5},
        5,
        "tensor=5 does not divide num_heads=12; use one of 1, 2, 3, 4, 6, 12",
    ),
    "kv heads": (
        MODEL,
        {"tensor": 3},
        3,
        "tensor=3 does not divide num_kv_heads=4; use one of 1, 2, 4",
    ),
    "layers": (
        MODEL,
        {"pipeline": 2, "virtual_pipeline": 4},
        2,
        "pipeline x virtual_pipeline=8 does not divide num_layers=12; use one of 1, 2, 3, 4, 6, 12",
    ),
    "world": (MODEL, {"tensor": 2}, 3, "3 processes cannot hold whole replicas of tensor=2"),
    "no experts": (MODEL, {"expert": 2}, 2, "expert=2, but the model has no experts"),
    "experts": (EXPERTS, {"expert": 4}, 4, "expert=4 does not divide num_experts=6; use one of 1,"),
    "expert ranks": (
        EXPERTS,
        {"expert": 3},
        2,
        "expert=3 does not divide tensor x context x data=2",
    ),
    "experts without sp": (
        EXPERTS,
        {"tensor": 2},
        2,
        "tensor=2 with experts needs sequence_parallel = true",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_layout_is_refused_with_the_valid_values(case):
    model, layout, world_size, message = BAD[case]
    with pytest.raises(ValueError) as error:
        check_parallel(model, ParallelConfig(**layout), world_size)
    assert message in str(error.value)


def test_layouts_that_no_model_could_have():
    with pytest.raises(ValueError, match="sequence_parallel = true needs tensor > 1"):
        ParallelConfig(sequence_parallel=True)
    with pytest.raises(ValueError, match="virtual_pipeline = 2 needs pipeline > 1"):
        ParallelConfig(virtual_pipeline=2)
