"""The whole job with experts: two expert ranks, a vLLM server, weights between them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from megatron_credit.batch.rollout_files import read_rollouts
from megatron_credit.batch.routing import decode_experts
from megatron_credit.trainer.metrics import read_metrics
from megatron_credit.trainer.run_directory import RunDirectory

ROOT = Path(__file__).parents[2]
QUICKSTART_MODEL = ROOT / "models" / "chain-sum-0.6m"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
EXPERTS, LAYERS = 8, 2
OVERRIDES = {
    "policy.random_weights": "true",
    "policy.router_replay": "true",
    "parallel.tensor": 1,
    "parallel.expert": 2,
    "run.processes": 2,
    "trainer.steps": 2,
    "trainer.prompts_per_step": 4,
    "trainer.samples_per_prompt": 4,
    "trainer.check_sync": "true",
    # Rewards of random weights are all alike; the decay alone changes them from step to step.
    "optimizer.weight_decay": 100.0,
    "optimizer.warmup_steps": 0,
    "sampling.max_new_tokens": 24,
    "task.eval_size": 8,
    "evaluation.every": 0,
    "checkpoint.every": 1,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A model directory with experts, random weights and the quickstart's tokenizer."""
    directory = tmp_path_factory.mktemp("moe") / "model"
    config = Qwen3MoeConfig(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the least that vLLM computes on a CPU
        max_position_embeddings=512,
        moe_intermediate_size=32,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        eos_token_id=1,
        pad_token_id=0,
    )
    # The engine reads weights before it is sent others.
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    for name in TOKENIZER_FILES:
        shutil.copyfile(QUICKSTART_MODEL / name, directory / name)
    return directory


@pytest.fixture(scope="module")
def run(model, tmp_path_factory) -> RunDirectory:
    directory = RunDirectory(tmp_path_factory.mktemp("runs") / "moe")
    overrides = OVERRIDES | {"policy.model": model, "run.directory": directory.root}
    command = [sys.executable, "-m", "megatron_credit.cli", "train", "configs/quickstart.toml"]
    for key, value in overrides.items():
        command += ["--set", f"{key}={value}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


def test_engine_and_trainer_agree_on_every_log_prob(run):
    records = read_metrics(run.metrics)
    assert [record["step"] for record in records] == [0, 1, 2]
    for record in records[1:]:
        assert record["mismatch/after_sync_max"] <= 1e-4
        assert record["mismatch/logprob_abs_max"] <= 1e-4
        assert record["optimizer/skipped"] == 0


def test_every_rollout_says_which_experts_computed_it(run):
    for rollout in read_rollouts(run.rollout_file(2)):
        num_tokens = len(rollout.prompt_ids) + len(rollout.response_ids)
        experts_LDK = decode_experts(rollout.routed_experts, num_tokens=num_tokens)
        assert experts_LDK.shape[1:] == (LAYERS, 2)
        assert experts_LDK[:-1].min() >= 0
        assert experts_LDK.max() < EXPERTS


def test_the_exported_model_is_one_that_transformers_reads(run, model):
    config = json.loads((run.model / "config.json").read_text())
    assert config["model_type"] == "qwen3_moe"
    tensors = load_file(run.model / "model.safetensors")
    experts = [name for name in tensors if ".mlp.experts." in name]
    assert len(experts) == LAYERS * EXPERTS * 3
    # The engine had other weights before the first sync.
    before = load_file(model / "model.safetensors")
    assert before.keys() == tensors.keys()
    assert not any(torch.equal(before[name], tensors[name]) for name in experts)
    loaded = AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32)
    gate_up = loaded.model.layers[1].mlp.experts.gate_up_proj[5]
    sides = [tensors[f"model.layers.1.mlp.experts.5.{side}_proj.weight"] for side in ("gate", "up")]
    assert torch.equal(gate_up, torch.cat(sides))
