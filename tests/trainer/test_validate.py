"""The checklist names every problem at once, and the plan of a run says what the run would do."""

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_credit.cli import app
from megatron_credit.mcore.architecture import read_architecture
from megatron_credit.trainer import check_layout
from megatron_credit.trainer.checks import check_run
from megatron_credit.trainer.load_config import load_config
from megatron_credit.trainer.plan_run import batch_plan, leaves
from megatron_credit.trainer.prediction import Machine, check_fits, predict
from megatron_credit.trainer.validate import examine

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "quickstart.toml"
HUGE = Machine(host=2**40, gpus=())
GIB = 2**30


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs a command on the quickstart with overrides; nothing may be written or started."""
    monkeypatch.chdir(ROOT)

    def run(*arguments, code=0):
        before = sorted(tmp_path.rglob("*"))
        line = [arguments[0], str(CONFIG), "--set", f"run.directory={tmp_path / 'run'}"]
        result = CliRunner().invoke(app, [*line, *arguments[1:]])
        assert result.exit_code == code, result.output
        assert sorted(tmp_path.rglob("*")) == before
        return result.output

    return run


@pytest.fixture
def quickstart(monkeypatch, tmp_path):
    """The quickstart's configuration with overrides, far from the repository's runs."""
    monkeypatch.chdir(ROOT)

    def load(*overrides):
        return load_config(CONFIG, [f"run.directory={tmp_path / 'run'}", *overrides])

    return load


def states(found):
    return {finding.name: finding.state for finding in found.findings}


def test_a_sound_run_is_fine(command):
    output = command("validate")
    assert len(re.findall("^ok ", output, re.M)) == len(output.splitlines()) == 13
    assert "qwen3, 4 layers, hidden 128" in output
    assert "longest prompt 15 + 70 new tokens, context 128" in output


def test_all_problems_at_once(quickstart, tmp_path):
    """Those of a model whose tokenizer is missing do not hide those of credit, layout or memory."""
    model = Path(shutil.copytree(ROOT / "models" / "chain-sum-0.6m", tmp_path / "model"))
    (model / "tokenizer.json").write_text("{}")
    overrides = (f"policy.model={model}", "credit.method=grop", "engine.kv_cache_mib=5000000")
    found = examine(quickstart(*overrides), HUGE)
    assert states(found) == {
        "credit": "problem",
        "loggers": "ok",
        "engine": "ok",
        "model": "ok",
        "layout": "ok",
        "weights": "ok",
        "tokenizer": "problem",
        "vocabulary": "skipped",
        "data": "skipped",
        "lengths": "skipped",
        "signals": "skipped",
        "start": "skipped",
        "memory": "problem",
    }
    assert not found.fine
    text = {finding.name: finding.text for finding in found.findings}
    assert "use one of grpo" in text["credit"]
    assert "the tokenizer does not load" in text["tokenizer"]
    assert "lower policy.tokens_per_microbatch" in text["memory"]


def test_a_problem_is_exit_code_2(command):
    output = command("validate", "--set", "parallel.tensor=3", code=2)
    assert "problem layout" in output and "does not divide num_heads=4" in output
    assert "skipped memory" in output and "ok      data" in output


@pytest.mark.parametrize(
    "override",
    [
        "credit.options={lam = 1}",
        "engine.max_num_seqs=4",
        "engine.max_model_len=1024",
        "policy.router_replay=true",
        "parallel.pipeline=3",
        "sampling.max_new_tokens=500",
        "policy.model=absent",
    ],
)
def test_what_training_refuses_is_a_problem(quickstart, override):
    config = quickstart(override)
    with pytest.raises(ValueError):
        check_run(config)
    assert not examine(config, HUGE).fine


def test_rows_that_were_left_out_are_counted(quickstart, tmp_path):
    rows = [{"prompt": f"What is {k} + {k}?", "answer": str(2 * k)} for k in range(20)]
    rows[3]["prompt"] = "What is " + " + ".join(["1"] * 200) + "?"
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = quickstart()
    data = {"train": str(path), "verifier": "exact", "max_prompt_tokens": 50, "eval_size": 4}
    tree = config.model_dump(mode="json") | {"task": None, "data": data}
    found = examine(type(config).model_validate(tree), HUGE)
    text = {finding.name: finding.text for finding in found.findings}
    assert found.fine, text
    assert "train sums: 15 of 20 rows; left out 1: too long; left out 4: held out" in text["data"]


def test_the_plan_of_the_quickstart(command):
    output = command("train", "--dry-run")
    assert "* optimizer.lr = 0.0005" in output and "\n  optimizer.eps = 1e-08" in output
    assert "24 prompts x 8 samples = 192 sequences, at most 24,576 tokens" in output
    assert "40 steps x 1 = 40 optimizer steps, 960 prompts" in output
    assert re.search(r"rank +pp +dp +cp +tp *\n +0 +0 +0 +0 +0 *\n +1 +0 +0 +0 +1", output)
    assert "step 0, in " in output and "nothing was written" in output


def test_the_plan_fills_in_and_names_the_checkpoint(command, tmp_path):
    from megatron_credit.mcore.conversion import hf_to_checkpoint

    model = ROOT / "models" / "chain-sum-0.6m"
    made = hf_to_checkpoint(model, tmp_path / "run" / "checkpoints", dtype="fp32")
    checkpoint = made.rename(made.with_name("step-000010"))
    overrides = ("--set", "run.allow_new_data=true", "--set", "sampling.max_new_tokens=100")
    output = command("train", "--dry-run", *overrides)
    assert f"goes on from {checkpoint}" in output
    output = command("train", "--dry-run", *overrides, "--set", "trainer.steps=5", code=2)
    assert "beyond trainer.steps=5" in output


def test_every_key_is_shown_and_marked(quickstart):
    config = quickstart()
    found = {leaf.name: leaf for leaf in leaves(config)}
    assert found["evaluation.every"].is_default
    assert not found["trainer.steps"].is_default
    assert found["engine.address"].value is None
    assert "task.min_terms" in found and "data" not in found


def test_batches_are_counted(quickstart):
    """4 prompts x 6 samples in 2 updates: 12 sequences on 2 data ranks, 3 to a micro-batch of 100
    tokens; an interleaved pipeline wants a multiple of its stages."""
    config = quickstart(
        "trainer.prompts_per_step=4",
        "trainer.samples_per_prompt=6",
        "trainer.updates_per_step=2",
        "trainer.steps=5",
        "policy.tokens_per_microbatch=100",
        "run.processes=4",
    )
    plan = batch_plan(config, context=30, num_prompts=40)
    assert (plan.sequences, plan.data_ranks, plan.microbatches) == (24, 2, 2)
    assert plan.epochs == 0.5
    assert "5 steps x 2 = 10 optimizer steps, 20 prompts, 0.50 times" in plan.lines()[2]
    stages = ("parallel.tensor=1", "parallel.pipeline=4", "parallel.virtual_pipeline=1")
    piped = quickstart(*stages, "policy.tokens_per_microbatch=100")
    assert batch_plan(piped, context=100, num_prompts=None).microbatches == 192


@pytest.mark.parametrize(
    ("machine", "overrides", "message"),
    [
        (Machine(host=GIB, gpus=()), (), "of 1.0 GiB free"),
        (HUGE, ("engine.kv_cache_mib=1", "engine.max_model_len=512"), ""),
        (HUGE, ("engine.kv_cache_mib=1", "engine.max_model_len=1024"), "needs 2.0 MiB of KV cache"),
        (Machine(host=GIB, gpus=(80 * GIB,)), (), "2 trainer ranks need as many GPUs"),
        (Machine(host=GIB, gpus=(GIB, GIB)), ("engine.gpu_memory=0.95",), "GPU 0: 1.1 GiB"),
        (Machine(host=GIB, gpus=(2 * GIB, GIB // 16)), (), "GPU 1: 177.5 MiB of 64.0 MiB"),
        (Machine(host=GIB, gpus=(2 * GIB, GIB)), (), ""),
        (Machine(host=GIB // 256, gpus=(2 * GIB, GIB)), (), "a save copies 9.8 MiB to the host's"),
    ],
)
def test_what_does_not_fit_says_so(quickstart, machine, overrides, message):
    config = quickstart(*overrides)
    prediction = predict(config, read_architecture(config.policy.model))
    if not message:
        assert check_fits(config, prediction, machine)
        return
    with pytest.raises(ValueError, match=message):
        check_fits(config, prediction, machine)


def test_a_wrong_layout_is_exit_code_1_and_is_named(command, monkeypatch):
    from megatron_credit.mcore.invariance import Deviation, Invariance

    loss = Deviation(name="loss", largest=1.0, error=0.0, noise=1e-7)
    bad = Deviation(name="decoder.final_layernorm.weight", largest=1.0, error=0.5, noise=1e-7)
    verdict = Invariance(loss=loss, gradients=[bad], tolerance=1e-5)
    jobs = []
    monkeypatch.setattr(check_layout, "check_invariance", lambda job: jobs.append(job) or verdict)
    output = command("validate", "--parallel", code=1)
    assert "the worst is decoder.final_layernorm.weight, off by 5.0e-01" in output
    assert jobs[0].parallel.tensor == jobs[0].num_processes == 2
    assert jobs[0].weights == Path("models/chain-sum-0.6m")


def test_ranks_that_have_no_room_are_not_started(command):
    with pytest.raises(ValueError, match="needs 4 GPUs, one for each rank, this machine has 2"):
        check_layout.check_ranks_fit(4, Machine(host=2**40, gpus=(GIB, GIB)))
    with pytest.raises(ValueError, match=r"4 processes, which need 2.7 GiB, but only 2.0 GiB"):
        check_layout.check_ranks_fit(4, Machine(host=2 * GIB, gpus=()))
    check_layout.check_ranks_fit(4, Machine(host=GIB, gpus=(GIB,) * 4))
    assert "add --parallel" in command("validate", "--full", code=2)


def test_a_large_model_is_checked_by_a_twin_which_says_so(quickstart, tmp_path):
    model = Path(shutil.copytree(ROOT / "models" / "chain-sum-0.6m", tmp_path / "model"))
    sizes = json.loads((model / "config.json").read_text())
    sizes |= {"hidden_size": 2048, "num_hidden_layers": 24, "vocab_size": 50_001}
    (model / "config.json").write_text(json.dumps(sizes))
    config = quickstart(f"policy.model={model}", "run.processes=16")
    job, words = check_layout.make_job(config, full=False)
    assert job.weights is None and job.architecture.num_layers == 2
    assert job.num_processes == 4  # of 8 data ranks two
    assert "a twin" in words[0] and "2 of 24 layers" in words[0]
    whole, words = check_layout.make_job(config, full=True)
    assert whole.weights == model and whole.num_processes == 16
    assert whole.architecture.num_layers == 24 and "twin" not in words[0]
