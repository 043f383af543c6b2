"""megatron-bridge as builder: what can be seen without it, and with one that is made up.

It runs on GPUs only; see docs/models.md for what was seen with the real one.
"""

import json
import subprocess
import sys

import pytest
from mcore.test_config_variants import LLAMA3

from megatron_credit.mcore.architecture import read_architecture
from megatron_credit.mcore.config import PolicyConfig

GEMMA = LLAMA3 | {"model_type": "gemma2", "head_dim": 256, "sliding_window": 4096}


def written(directory, config):
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_outline_of_another_family(tmp_path):
    found = read_architecture(written(tmp_path, GEMMA), "bridge")
    assert (found.num_layers, found.num_kv_heads, found.head_dim) == (32, 8, 256)
    assert (found.vocab_size, found.max_positions) == (128256, 8192)
    assert found.num_experts == 0
    mixtral = read_architecture(written(tmp_path, GEMMA | {"num_local_experts": 8}), "bridge")
    assert mixtral.num_experts == 8
    other = read_architecture(written(tmp_path, GEMMA | {"sliding_window": 2048}), "bridge")
    assert other.fingerprint() != found.fingerprint()


@pytest.mark.parametrize("key", ["final_logit_softcapping", "logit_scale", "logits_scaling"])
def test_logits_that_our_head_would_not_compute(tmp_path, key):
    with pytest.raises(ValueError, match=rf"config\.json: {key} is 30\.0; logits that are scaled"):
        read_architecture(written(tmp_path, GEMMA | {key: 30.0}), "bridge")


def test_other_families_are_pointed_to_it(tmp_path):
    with pytest.raises(ValueError, match=r'perhaps with policy\.converter = "bridge"'):
        read_architecture(written(tmp_path, GEMMA))


def test_no_random_weights(tmp_path):
    with pytest.raises(ValueError, match="set random_weights = false"):
        PolicyConfig(model=tmp_path, converter="bridge", random_weights=True)


WITHOUT_IT = """
from megatron_credit.mcore import cpu_mode
cpu_mode.enable()
from megatron_credit.mcore.bridge import BridgeConverter, require_bridge
try:
    require_bridge()
except ValueError as error:
    print(error)

import torch

class Bridge:
    def export_hf_weights(self, chunks, show_progress):
        assert chunks == ["chunk"] and not show_progress
        yield "model.norm.weight", torch.ones(3, dtype=torch.bfloat16)

converter = BridgeConverter(None, ["chunk"], Bridge())
print(converter.metadata(), [(name, tensor.tolist()) for name, tensor in converter.export()])
"""


def test_what_to_install_and_what_is_exported():
    """In a process of its own: importing megatron changes torch for good."""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT_IT], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    refusal, export = found.stdout.splitlines()[-2:]
    assert "needs megatron.bridge and transformer_engine, not installed here" in refusal
    assert "megatron-bridge==0.6.2" in refusal and "Python 3.12" in refusal
    meta = "TensorMeta(name='model.norm.weight', dtype=torch.bfloat16, shape=(3,))"
    assert export == f"[{meta}] [('model.norm.weight', [1.0, 1.0, 1.0])]"
