"""Frequencies of the rotary embedding, bit for bit those of transformers.

Logits and layouts are compared in test_convert.py, whose tiny models go beyond the first window.
"""

import json

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megatron_credit.mcore.architecture import read_architecture
from megatron_credit.mcore.rotary import frequencies, score_scale

SIZES = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 8,
    "vocab_size": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
# Published ones first; then each option, and the edges of the ramp.
CASES = {
    "plain": {},
    "small head": {"head_dim": 64, "rope_theta": 10000.0},
    "Llama 3.1": {"rope_scaling": LLAMA3},
    "Llama 3.2": {"rope_scaling": LLAMA3 | {"factor": 32.0}, "head_dim": 64},
    "linear": {"rope_scaling": {"type": "linear", "factor": 3.0}},
    "Qwen yarn": {"rope_scaling": YARN, "rope_theta": 1000000.0},
    "transformers 5": {"rope_parameters": YARN | {"rope_theta": 150000.0, "rope_type": "yarn"}},
    "attention factor": {"rope_scaling": YARN | {"attention_factor": 1.25}},
    "mscale": {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
    "one mscale": {"rope_scaling": YARN | {"mscale": 0.7}},
    "betas": {"rope_scaling": YARN | {"beta_fast": 16, "beta_slow": 2}},
    "fractional ramp": {"rope_scaling": YARN | {"truncate": False}},
    "step": {"rope_scaling": YARN | {"truncate": False, "beta_fast": 4.0, "beta_slow": 4.0}},
    "short window": {"rope_scaling": YARN | {"original_max_position_embeddings": 128}},
    "window of the model": {"rope_scaling": {"type": "yarn", "factor": 2.0}},
    "no stretch": {"rope_scaling": YARN | {"factor": 1.0}},
}


@pytest.fixture
def model_dir(tmp_path, request):
    (tmp_path / "config.json").write_text(json.dumps(SIZES | request.param))
    return tmp_path


@pytest.mark.parametrize("model_dir", CASES.values(), ids=CASES.keys(), indirect=True)
def test_frequencies_and_scale_are_those_of_transformers(model_dir):
    reference = LlamaRotaryEmbedding(AutoConfig.from_pretrained(model_dir))
    architecture = read_architecture(model_dir)
    assert torch.equal(frequencies(architecture), reference.inv_freq)
    expected = reference.attention_scaling**2 / architecture.head_dim**0.5
    assert score_scale(architecture) == pytest.approx(expected, rel=1e-12)


def test_the_cases_differ(tmp_path):
    """Each option is looked at: no two cases rotate alike, but for a factor of 1."""
    seen = set()
    for changes in CASES.values():
        (tmp_path / "config.json").write_text(json.dumps(SIZES | changes))
        architecture = read_architecture(tmp_path)
        seen.add((*frequencies(architecture).tolist(), score_scale(architecture)))
    assert len(seen) == len(CASES) - 1
