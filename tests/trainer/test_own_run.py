"""What a new user does: one Parquet file, one model directory and twelve lines of TOML."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megatron_credit.batch.rollout_files import read_rollouts
from megatron_credit.tasks.chain_sum import ChainSum, ChainSumConfig
from megatron_credit.trainer.metrics import read_metrics
from megatron_credit.trainer.run_directory import RunDirectory

MODEL = Path(__file__).parents[2] / "models" / "chain-sum-0.6m"
CONFIG = """\
[run]
directory = "{root}/run"
[data]
train = "{root}/sums.parquet"
eval_size = 16
verifier = "numeric"
[policy]
model = "{model}"
[sampling]
max_new_tokens = 70
[trainer]
steps = 2
"""


def questions(count):
    task = ChainSum(ChainSumConfig())
    prompts = [task.train_prompt(index) for index in range(count)]
    return {
        "prompt": [prompt.messages[0]["content"] for prompt in prompts],
        "answer": [prompt.answer for prompt in prompts],
    }


def megatron_credit(*arguments):
    command = [sys.executable, "-m", "megatron_credit.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("own")
    pyarrow.parquet.write_table(pyarrow.table(questions(100)), root / "sums.parquet")
    (root / "run.toml").write_text(CONFIG.format(root=root, model=MODEL))
    done = megatron_credit("train", root / "run.toml")
    assert done.returncode == 0, done.stderr
    return root, done.stdout


@pytest.fixture(scope="module")
def run(trained):
    return trained[0]


def test_it_trains_on_the_file(run):
    directory = RunDirectory(run / "run")
    records = read_metrics(directory.metrics)
    assert [record["step"] for record in records] == [0, 1, 2]
    assert all(record["optimizer/skipped"] == 0 for record in records[1:])
    # The model is right about half of the time, and the verifier can tell.
    assert 0.2 < records[1]["reward/mean"] < 0.8
    assert 0.2 < records[0]["eval/accuracy"] < 0.9
    rollouts = list(read_rollouts(directory.rollout_file(1)))
    assert len(rollouts) == 16 * 8
    answers = dict(zip(*questions(100).values(), strict=True))
    assert {rollout.answer for rollout in rollouts} <= set(answers.values())
    assert all((r.parsed == r.answer) == (r.reward == 1.0) for r in rollouts)


def test_it_says_what_it_read(trained):
    root, output = trained
    report = json.loads((root / "run" / "data.json").read_text())["report"]["sources"]["train/sums"]
    assert report["read"] == 100
    assert report["kept"] + sum(report["left_out"].values()) == 100
    assert f"train sums: {report['kept']} of 100 rows; left out 16: held out" in output


def test_a_changed_file_is_refused_with_both_fingerprints(run):
    directory = RunDirectory(run / "run")
    fingerprint = directory.read_data()["fingerprint"]
    table = questions(100)
    table["answer"][3] = "12345"
    original = (run / "sums.parquet").read_bytes()
    pyarrow.parquet.write_table(pyarrow.table(table), run / "sums.parquet")
    try:
        done = megatron_credit("train", run / "run.toml", "--set", "trainer.steps=3")
    finally:
        (run / "sums.parquet").write_bytes(original)
    assert done.returncode == 2
    assert f"its fingerprint was {fingerprint}, is " in done.stderr
    assert directory.checkpoint_steps() == [2]
    assert directory.read_data()["fingerprint"] == fingerprint
