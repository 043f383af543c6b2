"""`rollout`, `eval`, `train` on one engine, then `train --load-rollouts` without it."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from safetensors.torch import load_file
from trainer.step_records import lasting
from typer.testing import CliRunner

from megatron_credit.batch.rollout_files import read_rollouts
from megatron_credit.cli import app
from megatron_credit.rollouts.server import EngineServer
from megatron_credit.trainer.engine_run import Weights, served_directory
from megatron_credit.trainer.evaluation import summarise
from megatron_credit.trainer.load_config import load_config
from megatron_credit.trainer.metrics import read_metrics
from megatron_credit.trainer.rollout_meta import EACH_STEPS_OWN, read_meta
from megatron_credit.trainer.run_directory import RunDirectory
from megatron_credit.trainer.worker_environment import API_KEY_VARIABLE

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "chain-sum-0.6m"
SMALL = (
    "trainer.steps=2",
    "trainer.prompts_per_step=6",
    "trainer.samples_per_prompt=4",
    "task.eval_size=24",
    "evaluation.every=2",
    "evaluation.greedy=false",
    "checkpoint.every=1",
    "optimizer.warmup_steps=0",
)


class Workplace:
    """Runs commands one after the other on the same engine and keeps what they said."""

    def __init__(self, root, address):
        self.root = root
        self.address = address
        self.sampled = root / "sampled"
        self.result = root / "result.json"
        self.trained = RunDirectory(root / "trained")
        self.loaded = RunDirectory(root / "loaded")

    def command(self, name, *options, directory="unused", address=None):
        arguments = [name, str(ROOT / "configs" / "quickstart.toml"), *map(str, options)]
        overrides = [f"run.directory={self.root / directory}", f"policy.model={MODEL}", *SMALL]
        if address is not None:
            overrides.append(f"engine.address={address}")
        for override in overrides:
            arguments += ["--set", override]
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """After all commands. The engine is started once; the weights that it loads itself are those
    that a run begins with."""
    root = tmp_path_factory.mktemp("commands")
    config = load_config(ROOT / "configs" / "quickstart.toml", [])
    server = EngineServer.start(MODEL, config.engine, log_path=root / "engine.log", seed=1)
    place = Workplace(root, server.address)
    try:
        server.wait_ready(120)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(API_KEY_VARIABLE, server.api_key)
            engine = {"address": server.address}
            options = ("--steps", 1, "--output", place.sampled)
            place.first = place.command("rollout", *options, **engine)
            place.again = place.command("rollout", *options, **engine)
            options = ("--output", place.result, "--samples", 4, "--k", "1,4")
            place.shown = place.command("eval", *options, **engine)
            place.command("train", directory="trained", **engine)
    finally:
        server.stop()
    record = place.trained.rollouts
    place.without = place.command("train", "--load-rollouts", record, directory="loaded")
    return place


def test_rollout_samples_what_training_would(place):
    sampled = list(read_rollouts(place.sampled / "step-000001.jsonl"))
    trained = list(read_rollouts(place.trained.rollout_file(1)))
    assert len(sampled) == 24
    assert {r.versions[0].version for r in sampled} == {-1}  # weights that nobody numbered
    unscored = [
        replace(new, versions=old.versions, advantages=[], token_values={})
        for new, old in zip(trained, sampled, strict=True)
    ]
    assert unscored == sampled


def test_rollout_says_what_it_did_and_keeps_what_is_there(place):
    outcomes = [rollout.outcome for rollout in read_rollouts(place.sampled / "step-000001.jsonl")]
    right, wrong = outcomes.count("right"), outcomes.count("wrong")
    assert f"step 1 | rollouts 24 right {right} wrong {wrong}" in place.first
    assert "kept step 1, sampled before" in place.again and "rollouts" not in place.again


def test_rollouts_say_how_they_were_sampled(place):
    sampled, trained = read_meta(place.sampled), read_meta(place.trained.rollouts)
    assert (sampled.temperature, sampled.max_new_tokens, sampled.seed) == (1.0, 70, 1)
    assert sampled.weights == str(MODEL)
    assert trained == sampled.model_copy(update={"weights": EACH_STEPS_OWN})
    assert read_meta(place.loaded.rollouts) == trained


def test_eval_agrees_with_the_evaluation_of_the_run(place):
    answers = list(read_rollouts(place.result.with_suffix(".jsonl")))
    groups = [answers[k : k + 4] for k in range(0, len(answers), 4)]
    firsts = [group[0].reward for group in groups]
    before = read_metrics(place.trained.metrics)[0]["eval/accuracy"]
    assert len(firsts) == 24 and sum(firsts) / 24 == before
    expected = {name: asdict(value) for name, value in summarise(groups, (1, 4)).items()}
    found = json.loads(place.result.read_text())
    assert found["total"] == found["datasets"][""] == expected
    assert [prompt["right"] for prompt in found["prompts"]] == [
        sum(answer.reward for answer in group) for group in groups
    ]
    assert f"{expected['pass@4']['mean']:.3f} [" in place.shown
    assert "0 of 96 answers have no verdict" in place.shown


def test_training_on_the_record_is_the_same_bit_for_bit(place):
    expected = [lasting(record, "eval/") for record in read_metrics(place.trained.metrics)]
    found = [lasting(record, "eval/") for record in read_metrics(place.loaded.metrics)]
    assert found == expected
    assert [record["step"] for record in found] == [0, 1, 2] and found[1]["grad_norm"] > 0
    mine, theirs = (load_file(d.model / "model.safetensors") for d in (place.loaded, place.trained))
    start = load_file(MODEL / "model.safetensors")
    assert mine.keys() == theirs.keys()
    assert all(mine[name].equal(theirs[name]) for name in theirs)
    assert not any(mine[name].equal(start[name]) for name in start)


def test_training_on_the_record_keeps_it_and_has_no_engine(place):
    for step in (1, 2):
        assert (
            place.loaded.rollout_file(step).read_text()
            == place.trained.rollout_file(step).read_text()
        )
    assert "no evaluations: they need an engine" in place.without
    assert "sampled by the policy before each step" in place.without
    assert not (place.loaded.logs / "engine.log").exists()
    assert "eval/accuracy" not in read_metrics(place.loaded.metrics)[-1]


def test_a_checkpoint_is_served_as_the_model_that_was_exported(place, tmp_path):
    checkpoint = place.trained.checkpoint(2)
    with served_directory(Weights(checkpoint, MODEL, checkpoint), scratch=tmp_path) as served:
        found = load_file(served / "model.safetensors")
    expected = load_file(place.trained.model / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in expected)
    assert list(tmp_path.iterdir()) == []
