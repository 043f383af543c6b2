"""What can be wrong with `rollout`, `eval` and `train --load-rollouts`: one message, exit code 2,
and no process started."""

import json
import os
import sys
from pathlib import Path

import pytest
from trainer.record_cases import step
from typer.testing import CliRunner

from megatron_credit.batch.rollout_files import write_rollouts
from megatron_credit.cli import app
from megatron_credit.rollouts.server import EngineServer
from megatron_credit.trainer import local
from megatron_credit.trainer.load_config import load_config
from megatron_credit.trainer.record_rollouts import parse_steps
from megatron_credit.trainer.rollout_meta import describe_sampling, write_meta
from megatron_credit.trainer.run_directory import lock_directory

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "chain-sum-0.6m"
SMALL = ("trainer.steps=1", "trainer.prompts_per_step=2", "trainer.samples_per_prompt=2")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The error of a command; starting a process is a failure."""

    def no_process(*_arguments, **_options):
        raise AssertionError("a process was started")

    monkeypatch.setattr(EngineServer, "start", no_process)
    monkeypatch.setattr(local, "start_trainer", no_process)
    monkeypatch.chdir(ROOT)

    def command(name, *options, config="configs/quickstart.toml", overrides=SMALL, expect=2):
        arguments = [name, str(config), *map(str, options)]
        for override in (f"run.directory={tmp_path / 'run'}", *overrides):
            arguments += ["--set", override]
        result = CliRunner().invoke(app, arguments)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.output
        assert result.exit_code == expect, result.output
        return " ".join(result.output.split())

    return command


both = pytest.mark.parametrize("command", ["rollout", "eval"])


@both
def test_no_configuration(run, command):
    assert "no configuration file at" in run(command, config="configs/absent.toml")


@both
def test_weights_that_are_none(run, command):
    found = run(command, "--model", "models/absent")
    assert "models/absent is no model directory (with config.json) and no complete" in found


def test_a_checkpoint_that_is_not_kept_names_those_that_are(run, tmp_path):
    (tmp_path / "run" / "checkpoints" / "step-000004").mkdir(parents=True)
    assert "checkpoints has step-000004" in run("eval", "--checkpoint", "step-000002")


@both
def test_no_weights_to_sample_from(run, command):
    found = run(command, overrides=("policy.random_weights=true",))
    assert "there are no weights to sample from; name a model" in found


@both
def test_a_running_engine_has_its_own_weights(run, command):
    found = run(command, "--model", MODEL, overrides=("engine.address=http://127.0.0.1:1",))
    assert "engine.address=http://127.0.0.1:1 serves weights of its own" in found


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_output_that_cannot_be_written(run, tmp_path):
    tmp_path.chmod(0o500)
    assert "cannot be written to" in run("rollout", "--output", tmp_path / "out")


@both
def test_output_below_a_file(run, command, tmp_path):
    (tmp_path / "file").write_text("")
    found = run(command, "--output", tmp_path / "file" / "out.json")
    assert "cannot be written to" in found and "name another place" in found


@both
def test_two_processes_in_one_place(run, command, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    option = output if command == "rollout" else output / "result.json"
    with lock_directory(output, otherwise=""):
        found = run(command, "--output", option)
    assert f"(process {os.getpid()}) is at work in {output}" in found
    assert "name another --output" in found


@pytest.mark.parametrize("steps", ["0", "3-1", "x", "1-", "-1", "1,2"])
def test_steps_that_are_none(run, steps):
    assert "names no steps; give one, such as 3" in run("rollout", f"--steps={steps}")


def test_steps():
    assert list(parse_steps(None, last=3)) == [1, 2, 3]
    assert list(parse_steps("7", last=3)) == [7]
    assert list(parse_steps("2-4", last=3)) == [2, 3, 4]


def test_rollouts_that_were_sampled_otherwise(run, tmp_path):
    config = load_config(ROOT / "configs" / "quickstart.toml", ["sampling.temperature=0.5"])
    write_meta(tmp_path, describe_sampling(config, questions="q", weights="w"))
    found = run("rollout", "--output", tmp_path)
    assert "holds rollouts that were sampled otherwise" in found
    assert "temperature: was 0.5, is 1.0" in found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--samples", "4", "--k", "1,8"], "--k 8 is above --samples 4: the best of 8 answers"),
        (["--k", "16"], "--k 16 is above --samples 8"),
        (["--k", "0"], "is no list of numbers from 1 on"),
        (["--k", "1,,2"], "is no list of numbers from 1 on"),
        (["--samples", "0"], "--samples 0: expected 1 to engine.max_num_seqs=256"),
        (["--samples", "300"], "--samples 300: expected 1 to engine.max_num_seqs=256"),
        (["--temperature", "-1"], "--temperature -1.0 is none"),
        (["--temperature", "nan"], "--temperature nan is none"),
        (["--temperature", "0", "--samples", "4"], "gives the same answer 4 times"),
        (["--output", "result.txt"], "expected the name of a .json file"),
        (["--model", "a", "--checkpoint", "b"], "both name weights"),
    ],
)
def test_eval_options_that_do_not_fit(run, options, message):
    assert message in run("eval", *options)


def test_no_held_out_prompts(run, tmp_path):
    rows = [{"prompt": f"{i} + {i} =", "answer": str(2 * i)} for i in range(4)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = (ROOT / "configs" / "quickstart.toml").read_text()
    start, end = config.index("[task]"), config.index("[policy]")
    data = f'[data]\ntrain = "{tmp_path / "sums.jsonl"}"\nverifier = "exact"\n\n'
    (tmp_path / "own.toml").write_text(config[:start] + data + config[end:])
    found = run("eval", config=tmp_path / "own.toml")
    assert "no held-out prompts to evaluate on; name files of their own by data.eval" in found


@pytest.fixture
def record(tmp_path):
    """Two groups of two for one step, and how they were sampled."""
    directory = tmp_path / "record"
    directory.mkdir()
    write_rollouts(directory / "step-000001.jsonl", step("a", "b"))
    config = load_config(ROOT / "configs" / "quickstart.toml", list(SMALL))
    write_meta(directory, describe_sampling(config, questions="q", weights="w"))
    return directory


def load(run, record, *overrides):
    return run("train", "--load-rollouts", record, overrides=(*SMALL, *overrides))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.steps=3", "has no rollouts of step 2-3 (steps 1 to 3 are to be trained)"),
        ("trainer.samples_per_prompt=4", "expected trainer.samples_per_prompt=4"),
        ("trainer.prompts_per_step=3", "holds 2 groups; expected trainer.prompts_per_step=3"),
        ("sampling.temperature=0.5", "temperature: was 1.0, is 0.5"),
        ("sampling.max_new_tokens=60", "max_new_tokens: was 70, is 60"),
        ("credit.method=grop", "use one of"),
    ],
)
def test_a_record_that_does_not_fit_the_run(run, record, override, message):
    assert message in load(run, record, override)


def test_a_record_of_another_tokenizer(run, record):
    meta = json.loads((record / "meta.json").read_text())
    (record / "meta.json").write_text(json.dumps(meta | {"tokenizer": "other"}))
    assert "do not fit this configuration: tokenizer: was 'other'" in load(run, record)


def test_a_broken_meta(run, record):
    (record / "meta.json").write_text('{"version": 2}')
    assert "meta.json is none of ours: version" in load(run, record)


def test_a_record_that_is_none(run, record, tmp_path):
    (record / "step-000001.jsonl").write_text('{"prompt": "1 + 1"}\n')
    assert "step-000001.jsonl, line 1: not a rollout record: missing field" in load(run, record)
    assert "there are no rollouts at" in load(run, tmp_path / "absent")


def test_a_run_does_not_read_what_it_writes(run, tmp_path):
    own = tmp_path / "run" / "rollouts"
    own.mkdir(parents=True)
    write_rollouts(own / "step-000001.jsonl", step("a", "b"))
    assert "would be written over" in load(run, own)
    assert "would be written over" in load(run, own / "step-000001.jsonl")


def test_no_vllm_is_needed_to_get_as_far_as_the_rollouts(run, record, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # importing it fails
    write_rollouts(record / "step-000001.jsonl", step("a"))
    assert "holds 1 groups" in load(run, record)
