"""The real engine on prompts far beyond the window that rotary positions were stretched from.

transformers is the measure here; that the trainer computes what transformers does is seen in
tests/mcore.
"""

import pytest
import torch
from rollouts.engine_checks import SIZES, largest_gap, request, started, uneven
from transformers import LlamaConfig, LlamaForCausalLM

WINDOW = 32
STRETCHED = {"factor": 16.0, "rope_theta": 10_000.0, "original_max_position_embeddings": WINDOW}
SCALINGS = {
    "llama3": STRETCHED | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": STRETCHED,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SCALINGS)
def test_logprobs_beyond_the_first_window(tmp_path, kind):
    scaled = llama(SCALINGS[kind] | {"rope_type": kind})
    prompts = [[token % 300 + 10 for token in range(length)] for length in (8, 5 * WINDOW, 290)]
    requests = [request(prompt) for prompt in prompts]
    with started(scaled, tmp_path) as engine:
        assert largest_gap(scaled, engine.client, requests) <= 1e-4
        # What would be seen if the engine did not stretch them.
        plain = llama({"rope_type": "default", "rope_theta": 10_000.0})
        plain.load_state_dict(scaled.state_dict())
        assert largest_gap(plain, engine.client, requests) >= 1e-2


def llama(rope):
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, intermediate_size=256, rope_parameters=rope)
    return uneven(LlamaForCausalLM(config))
