"""What the user can get wrong: one clear message, exit code 2, and nothing started or written."""

import json
import shutil
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_credit.cli import app
from megatron_credit.trainer import local

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "chain-sum-0.6m"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs `train` with overrides; starting a process is a failure."""

    def no_process(*_arguments, **_options):
        raise AssertionError("a process was started")

    monkeypatch.setattr(local, "start_engine", no_process)
    monkeypatch.setattr(local, "start_trainer", no_process)
    monkeypatch.chdir(ROOT)

    def command(*overrides, config="configs/quickstart.toml"):
        arguments = ["train", str(config), "--set", f"run.directory={tmp_path / 'run'}"]
        for override in overrides:
            arguments += ["--set", override]
        result = CliRunner().invoke(app, arguments)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.output
        assert result.exit_code == 2, result.output
        assert not (tmp_path / "run" / "metrics.jsonl").exists()
        return " ".join(result.output.split())

    return command


@pytest.fixture
def model(tmp_path):
    """A copy of the shipped model to spoil."""
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


def edit(path, **changes):
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | changes))


def test_missing_config(run):
    assert "no configuration file at" in run(config="configs/nothing.toml")


def test_malformed_config(run, tmp_path):
    (tmp_path / "bad.toml").write_text("[run\n")
    assert "is not valid TOML" in run(config=tmp_path / "bad.toml")


def test_unknown_key(run):
    assert "did you mean 'steps'" in run("trainer.stpes=3")


def test_wrong_type(run):
    assert "valid integer" in run("trainer.steps=1.5")


def test_unknown_credit_method(run):
    assert "credit.method='grop' is unknown; use one of grpo" in run("credit.method=grop")


def test_unknown_credit_option(run):
    assert "unknown option 'lam'" in run("credit.options={lam = 1}")


def test_no_model_directory(run, tmp_path):
    assert "is not a directory" in run(f"policy.model={tmp_path / 'absent'}")


def test_directory_without_weights(run, model):
    (model / "model.safetensors").unlink()
    assert "holds no model.safetensors" in run(f"policy.model={model}")


def test_index_that_names_a_missing_file(run, model):
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "which do not exist" in run(f"policy.model={model}")


def test_unsupported_family(run, model):
    edit(model / "config.json", model_type="mamba")
    assert "model_type is 'mamba'" in run(f"policy.model={model}")


def test_no_tokenizer(run, model):
    for path in model.glob("tokenizer*"):
        path.unlink()
    assert "holds no tokenizer.json" in run(f"policy.model={model}")


def test_broken_tokenizer(run, model):
    (model / "tokenizer.json").write_text("{}")
    assert "the tokenizer does not load" in run(f"policy.model={model}")


def test_tokenizer_larger_than_the_vocabulary(run, model):
    edit(model / "config.json", vocab_size=100)
    assert "these files do not belong together" in run(f"policy.model={model}")


def test_prompt_longer_than_the_context(run):
    output = run("engine.max_model_len=75")
    assert "engine.max_model_len=75; raise it, or allow at most" in output


def test_context_longer_than_the_model(run):
    assert "max_position_embeddings=512" in run("engine.max_model_len=1024")


def test_group_larger_than_the_engine_decodes_together(run):
    assert "samples_per_prompt=8 is above engine.max_num_seqs=4" in run("engine.max_num_seqs=4")


def test_batch_not_divisible(run):
    assert "is not divisible by trainer.updates_per_step=7" in run("trainer.updates_per_step=7")


def test_tensor_parallel_does_not_divide_the_heads(run):
    assert "tensor=3 does not divide num_heads=4; use one of 1, 2, 4" in run("parallel.tensor=3")


def test_pipeline_does_not_divide_the_layers(run):
    output = run("parallel.tensor=1", "parallel.pipeline=3")
    assert "does not divide num_layers=4" in output


def test_router_replay_without_experts(run):
    output = run("policy.router_replay=true")
    assert "policy.router_replay = true, but" in output and "has no experts" in output


def test_processes_are_no_multiple(run):
    assert "run.processes=3 is not a multiple" in run("run.processes=3")


def test_port_in_use(run):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"engine.port={port} cannot be used" in run(f"engine.port={port}")


def test_no_engine_at_the_address(run):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{probe.getsockname()[1]}"
    assert f"engine.address={address}: no vLLM server answers" in run(f"engine.address={address}")


def test_checkpoint_that_is_none(run, tmp_path):
    assert "is not a checkpoint directory" in run(f"run.resume={tmp_path / 'step-000003'}")


def test_another_configuration_in_the_same_directory(run, tmp_path):
    from megatron_credit.trainer.load_config import load_config

    (tmp_path / "run").mkdir()
    earlier = load_config(ROOT / "configs" / "quickstart.toml", ["optimizer.lr=0.5"])
    (tmp_path / "run" / "config.json").write_text(earlier.model_dump_json())
    assert "optimizer.lr: was 0.5, is 0.0005" in run()


def test_never_resume_where_a_run_is(run, tmp_path):
    (tmp_path / "run" / "checkpoints" / "step-000010").mkdir(parents=True)
    assert "already holds a run" in run("run.resume=never")
