"""The whole job with real parts: Megatron ranks, a vLLM server, weights between them; and kills."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from trainer.step_records import lasting

from megatron_credit.batch.rollout_files import read_rollouts
from megatron_credit.trainer.metric_names import is_known
from megatron_credit.trainer.metrics import read_metrics
from megatron_credit.trainer.run_directory import RunDirectory

ROOT = Path(__file__).parents[2]
SMALL = (
    "trainer.steps=5",
    "trainer.prompts_per_step=6",
    "trainer.samples_per_prompt=4",
    "task.eval_size=32",
    "evaluation.every=4",
    "checkpoint.every=2",
)
LIMIT_S = 240


def command(directory, *overrides):
    parts = [sys.executable, "-m", "megatron_credit.cli", "train", "configs/quickstart.toml"]
    for override in (f"run.directory={directory}", *SMALL, *overrides):
        parts += ["--set", override]
    return parts


def train(directory, *overrides, expect=0):
    result = subprocess.run(
        command(directory, *overrides), cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert result.returncode == expect, result.stdout + result.stderr
    return result.stdout + result.stderr


def wait_until(condition, what):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "undisturbed"
    return RunDirectory(directory), train(directory)


def test_it_trains_to_the_end_and_leaves_everything(undisturbed):
    directory, output = undisturbed
    records = read_metrics(directory.metrics)
    assert [record["step"] for record in records] == [0, 1, 2, 3, 4, 5]
    assert "step 5 | reward" in output and "trained to step 5" in output
    assert [int("eval/accuracy" in record) for record in records] == [1, 0, 0, 0, 1, 1]
    assert directory.checkpoint_steps() == [4, 5]
    assert directory.curve.stat().st_size > 10_000
    assert sorted(path.name for path in directory.logs.iterdir()) == [
        "engine.log",
        "torchrun.log",
        "trainer-0.log",
        "trainer-1.log",
    ]
    assert list((directory.root / "tensorboard").iterdir())
    rollouts = [json.loads(line) for line in directory.rollout_file(5).read_text().splitlines()]
    assert len(rollouts) == 24
    assert {tuple(span) for r in rollouts for span in r["versions"]} == {
        (4, 0, len(r["response_ids"])) for r in rollouts
    }


def test_rollouts_say_what_the_trainer_found_of_each_token(undisturbed):
    for rollout in read_rollouts(undisturbed[0].rollout_file(2)):
        policy_T = torch.tensor(rollout.token_values["policy_logprob"])
        gap_T = (policy_T - torch.tensor(rollout.logprobs)).abs()
        assert gap_T.max() <= 1e-4
        assert len(rollout.token_values["entropy"]) == len(rollout.response_ids)
        assert min(rollout.token_values["entropy"]) >= 0
        assert rollout.outcome in ("right", "wrong", "unparsed")
        assert (rollout.reward == 1.0) == (rollout.parsed == rollout.answer)
        # One credit for the whole response, positive where it was better than its group.
        assert len(set(rollout.advantages)) == 1
        assert (rollout.advantages[0] > 0) <= (rollout.reward == 1.0)


def test_every_metric_is_documented(undisturbed):
    names = {name for record in read_metrics(undisturbed[0].metrics) for name in record}
    assert [name for name in names if not is_known(name)] == []
    assert {"reward/right", "group/equal_rewards", "credit/max", "timing/sync_s"} <= names


def test_engine_and_trainer_agree_on_every_log_prob(undisturbed):
    records = read_metrics(undisturbed[0].metrics)
    assert max(record.get("mismatch/logprob_abs_max", 0) for record in records) <= 1e-4
    assert all(record["optimizer/skipped"] == 0 for record in records[1:])


def test_the_exported_model_is_the_trained_one(undisturbed):
    directory, _ = undisturbed
    before = load_file(ROOT / "models" / "chain-sum-0.6m" / "model.safetensors")
    after = load_file(directory.model / "model.safetensors")
    assert before.keys() == after.keys()
    changed = max((after[name] - before[name]).abs().max().item() for name in before)
    assert 1e-4 < changed < 1e-1


def test_a_killed_run_goes_on_as_if_nothing_had_happened(undisturbed, tmp_path):
    directory = RunDirectory(tmp_path / "killed")
    launcher = subprocess.Popen(
        command(directory.root), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_until(
        lambda: len(read_metrics(directory.metrics)) > 3 or launcher.poll() is not None, "step 3"
    )
    assert launcher.poll() is None
    family = psutil.Process(launcher.pid).children(recursive=True)
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    _, alive = psutil.wait_procs(family, timeout=40)
    assert not [child for child in alive if child.status() != "zombie"]
    kept = directory.checkpoint_steps()
    assert kept and kept[-1] < 5
    output = train(directory.root)
    assert f"going on from {directory.checkpoint(kept[-1])}" in output
    expected = [lasting(record) for record in read_metrics(undisturbed[0].metrics)]
    assert [lasting(record) for record in read_metrics(directory.metrics)] == expected
    for step in range(1, 6):
        assert (
            directory.rollout_file(step).read_text()
            == undisturbed[0].rollout_file(step).read_text()
        )
    mine = load_file(directory.model / "model.safetensors")
    theirs = load_file(undisturbed[0].model / "model.safetensors")
    assert all(mine[name].equal(theirs[name]) for name in theirs)


def test_a_finished_run_has_nothing_left_to_do(undisturbed):
    directory, _ = undisturbed
    before = directory.metrics.read_text()
    start = time.monotonic()
    train(directory.root)
    assert time.monotonic() - start < 30  # no engine, no trainer
    assert directory.metrics.read_text() == before


def test_one_rank_two_updates_and_a_checked_sync(tmp_path):
    train(
        tmp_path / "one",
        "parallel.tensor=1",
        "trainer.steps=2",
        "trainer.updates_per_step=2",
        "trainer.check_sync=true",
        "evaluation.every=0",
    )
    records = read_metrics(tmp_path / "one" / "metrics.jsonl")
    for record in records[1:]:
        assert record["mismatch/logprob_abs_max"] <= 1e-4
        assert record["mismatch/after_sync_max"] <= 1e-4
        assert record["policy/ratio"] != 1.0  # the second update is off-policy


def test_another_models_checkpoint_is_refused(undisturbed, tmp_path):
    directory, _ = undisturbed
    model = tmp_path / "model"
    model.mkdir()
    for path in (ROOT / "models" / "chain-sum-0.6m").iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    output = train(
        tmp_path / "other",
        f"policy.model={model}",
        f"run.resume={directory.checkpoint(4)}",
        expect=2,
    )
    assert "has architecture=" in output and "but this run has architecture=" in output


def test_an_engine_that_cannot_start_is_the_users_to_correct(tmp_path):
    output = train(tmp_path / "none", "engine.tensor_parallel=3", expect=2)
    assert "the engine cannot start" in output and "engine.log" in output
