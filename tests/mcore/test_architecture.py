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
from megatron_credit.mcore.rope_scaling import LinearScaling, Llama3Scaling, YarnScaling

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
LLAMA = QWEN2 | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "sliding_window": None,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 4096}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


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


def test_what_old_llama_checkpoints_leave_out(tmp_path):
    left_out = {"num_key_value_heads", "rope_theta", "tie_word_embeddings", "rms_norm_eps"}
    llama = {name: value for name, value in LLAMA.items() if name not in left_out}
    found = read_architecture(write_config(tmp_path, llama))
    assert (found.num_kv_heads, found.rope_theta) == (14, 10_000.0)
    assert (found.tied_embeddings, found.norm_eps) == (False, 1e-6)


@pytest.mark.parametrize(("family", "head_dim"), [("qwen3", 128), ("qwen2", 64), ("llama", 64)])
def test_head_size_that_is_left_out(tmp_path, family, head_dim):
    config = QWEN2 | {"model_type": family, "architectures": None, "sliding_window": None}
    assert read_architecture(write_config(tmp_path, config)).head_dim == head_dim


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_scaled_rotary_positions(tmp_path, place):
    llama = LLAMA | {place: LLAMA3 | {"rope_theta": 5e5}, "max_position_embeddings": 32000}
    found = read_architecture(write_config(tmp_path, llama))
    assert (found.rope_theta, found.max_positions) == (5e5, 32000)
    assert found.rope_scaling == Llama3Scaling(
        factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=8192
    )
    qwen = read_architecture(write_config(tmp_path, QWEN2 | {place: YARN}))
    assert qwen.rope_theta == 1e6  # at the top level
    assert qwen.rope_scaling == YarnScaling(
        factor=4.0,
        original_positions=8192,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=True,
        attention_factor=pytest.approx(1.1386294361),  # 0.1 ln 4 + 1
    )
    linear = {place: {"type": "linear", "factor": 2.5}}
    found = read_architecture(write_config(tmp_path, LLAMA | linear))
    assert (found.rope_scaling, found.max_positions) == (LinearScaling(factor=2.5), 81920)


def test_longest_sequence_of_yarn_is_one_that_the_engine_has_rotations_for(tmp_path):
    """vLLM tabulates original window x factor positions, and accepts max_position_embeddings."""
    short = QWEN2 | {"rope_scaling": YARN | {"factor": 2.0}}
    assert read_architecture(write_config(tmp_path, short)).max_positions == 16384
    long = QWEN2 | {"rope_scaling": YARN | {"factor": 8.0}}
    assert read_architecture(write_config(tmp_path, long)).max_positions == 32768


REFUSED = {
    "family": (QWEN2 | {"model_type": "gemma3"}, ["model_type is 'gemma3'", "qwen3, qwen3_moe"]),
    "class": (
        QWEN2 | {"architectures": ["Qwen2ForSequenceClassification"]},
        ["architectures is ['Qwen2ForSequenceClassification'], expected ['Qwen2ForCausalLM']"],
    ),
    "missing": (without("hidden_size"), ["hidden_size is missing"]),
    "missing groups": (without("num_key_value_heads"), ["num_key_value_heads is missing"]),
    "null": (QWEN2 | {"vocab_size": None}, ["vocab_size is missing"]),
    "no head": (
        QWEN2 | {"model_type": "qwen3", "architectures": None, "head_dim": None},
        ["head_dim is None", "positive whole"],
    ),
    "text size": (QWEN2 | {"hidden_size": "896"}, ["hidden_size is '896'", "positive whole"]),
    "zero": (QWEN2 | {"num_hidden_layers": 0}, ["num_hidden_layers is 0", "positive whole"]),
    "true size": (QWEN2 | {"vocab_size": True}, ["vocab_size is True", "positive whole"]),
    "negative eps": (QWEN2 | {"rms_norm_eps": -1}, ["rms_norm_eps is -1", "positive number"]),
    "nan eps": (QWEN2 | {"rms_norm_eps": float("nan")}, ["rms_norm_eps is nan", "positive number"]),
    "window": (QWEN2 | SLIDING, ["sliding_window is 4096, below the model's 32768", "full"]),
    "no size": (QWEN2 | SLIDING | {"sliding_window": "all"}, ["sliding_window is 'all'"]),
    "odd layers": (QWEN2 | SLIDING | {"max_window_layers": "all"}, ["max_window_layers is 'all'"]),
    "stretched window": (
        LLAMA | {"sliding_window": 32768, "rope_scaling": {"type": "linear", "factor": 2.0}},
        ["sliding_window is 32768, below the model's 65536"],
    ),
    "llama window": (LLAMA | {"sliding_window": 128}, ["sliding_window", "full attention"]),
    "unknown key": (
        QWEN2 | {"dual_chunk_attention_config": {"chunk_size": 262144}},
        ["dual_chunk_attention_config is {'chunk_size': 262144}; this key is not known", "delete"],
    ),
    "layer types": (
        QWEN2 | {"layer_types": ["full_attention", "sliding_attention"]},
        ["layer_types", "only full_attention"],
    ),
    "dynamic": (
        QWEN2 | {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        ["rope_scaling has type 'dynamic'", "a longer sequence", "default, linear, llama3, yarn"],
    ),
    "longrope": (
        LLAMA | {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}},
        ["rope_parameters has type 'longrope'", "short", "default, linear, llama3, yarn"],
    ),
    "rope of two kinds": (
        QWEN2 | {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
        ["rope_parameters has ['full_attention']"],
    ),
    "no rope": (QWEN2 | {"rope_scaling": "linear"}, ["rope_scaling is 'linear'", "object"]),
    "rope twice": (
        QWEN2 | {"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 2.0}},
        ["rope_scaling is {", "rope_parameters is {", "keep"],
    ),
    "no factor": (
        QWEN2 | {"rope_scaling": {"type": "linear"}},
        ["rope_scaling.factor is missing"],
    ),
    "factor": (QWEN2 | {"rope_scaling": YARN | {"factor": "4"}}, ["rope_scaling.factor is '4'"]),
    "truncate": (QWEN2 | {"rope_scaling": YARN | {"truncate": 1}}, ["rope_scaling.truncate is 1"]),
    "no band": (
        LLAMA | {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}},
        ["rope_scaling.high_freq_factor is 1.0, expected more than 1.0"],
    ),
    "two windows": (
        LLAMA | {"rope_scaling": LLAMA3, "original_max_position_embeddings": 4096},
        ["original_max_position_embeddings differs", "[4096, 8192]"],
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
    "bias": (LLAMA | {"attention_bias": True}, ["attention_bias is True", "expected False"]),
    "mlp bias": (LLAMA | {"mlp_bias": True}, ["mlp_bias is True", "expected False"]),
    "scaled logits": (LLAMA | {"logit_scale": 0.0625}, ["logit_scale is 0.0625", "expected 1"]),
    "kv heads": (QWEN2 | {"num_key_value_heads": 4}, ["num_key_value_heads is 4", "=14"]),
    "head_dim": (QWEN2 | {"hidden_size": 900}, ["head_dim is missing", "=900", "=14"]),
    "partial head": (
        QWEN2 | {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.25}},
        ["rope_parameters.partial_rotary_factor is 0.25, expected 1"],
    ),
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
    if field == "family":
        other = "llama"
    elif field == "rope_scaling":
        other = LinearScaling(factor=2.0)
    else:
        other = not value if isinstance(value, bool) else value + 1
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
        "expert x expert_tensor=3 does not divide tensor x context x data=2",
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
