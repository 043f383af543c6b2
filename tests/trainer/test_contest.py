"""Comparison of configurations: figures against hand-made numbers, and two real runs each."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from megatron_credit.trainer.contest.entries import read_entries
from megatron_credit.trainer.contest.figures import (
    Interval,
    Record,
    curve,
    interval,
    step_means,
    step_times,
)
from megatron_credit.trainer.contest.report import markdown
from megatron_credit.trainer.contest.run import compare

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.toml"
SMALL = (
    "parallel.tensor=1",
    f"policy.model={ROOT / 'models' / 'chain-sum-0.6m'}",
    "trainer.steps=2",
    "trainer.prompts_per_step=2",
    "trainer.samples_per_prompt=4",
    "task.eval_size=8",
    "evaluation.every=2",
    "loggers.tensorboard=false",
)


def record(name, seed, accuracies, step_s):
    """A run with these accuracies at steps 0, 10, ... and steps of so many seconds."""
    steps = {
        number: {"timing/step_s": step_s, "timing/train_s": step_s / 2, "reward/mean": number / 10}
        for number in range(1, 11)
    }
    for place, accuracy in enumerate(accuracies):
        steps.setdefault(10 * place, {})["eval/accuracy"] = accuracy
    return Record(name, seed, steps)


RECORDS = [
    record("grpo", 1, [0.4, 0.5], 1.0),
    record("grpo", 2, [0.4, 0.7], 2.0),
    record("other", 1, [0.4, 0.6], 1.5),
    record("other", 2, [0.4, 0.9], 3.0),
]


def test_curves_are_means_and_gains_are_paired_by_seed():
    lines = {(line.name, line.step): line for line in curve(RECORDS, "eval/accuracy")}
    assert lines["grpo", 0].value == Interval(0.4, 0.4, 0.4)
    assert lines["grpo", 10].value.mean == pytest.approx(0.6)
    assert lines["grpo", 10].gain is None
    gain = lines["other", 10].gain
    # Gains of 0.1 and 0.2: the resampled means lie between them.
    assert (gain.mean, gain.low, gain.high) == pytest.approx((0.15, 0.1, 0.2))


def test_a_step_that_a_seed_lacks_is_left_out():
    records = [*RECORDS[:1], Record("grpo", 2, {0: {"eval/accuracy": 0.1}})]
    assert [line.step for line in curve(records, "eval/accuracy")] == [0]


def test_intervals_do_not_change_between_calls():
    assert interval([0.1, 0.5, 0.3]) == interval([0.1, 0.5, 0.3])
    low, high = interval([0.0, 1.0] * 8).low, interval([0.0, 1.0] * 8).high
    assert 0.2 < low < 0.35 and 0.65 < high < 0.8


def test_times_are_medians_over_the_baseline_of_the_same_seed():
    grpo, other = step_times(RECORDS)
    assert (grpo.step_s, grpo.ratio) == (1.5, 1.0)
    assert (other.step_s, other.ratio) == (2.25, 1.5)
    assert other.phases == {"rollout": 0.0, "signals": 0.0, "train": 1.125, "sync": 0.0}


def test_means_over_steps():
    means = step_means(RECORDS, ["reward/mean", "absent"])
    assert means == {"grpo": {"reward/mean": 0.55}, "other": {"reward/mean": 0.55}}


def test_the_table_names_every_configuration():
    lines = {"eval/accuracy": curve(RECORDS, "eval/accuracy")}
    text = markdown(lines, step_means(RECORDS, ["reward/mean"]), step_times(RECORDS), {"a": "b"})
    assert "| other | 0.400 [0.400, 0.400]; +0.000 [+0.000, +0.000] | 0.750" in text
    assert "| other | 2.25 | 0.00 | 0.00 | 1.12 | 0.00 | +50% |" in text


def test_configurations_that_cannot_be_compared(tmp_path):
    longer = tmp_path / "longer.toml"
    longer.write_text(QUICKSTART.read_text().replace("max_new_tokens = 70", "max_new_tokens = 60"))
    with pytest.raises(ValueError, match=r"longer and quickstart differ in \[sampling\]"):
        read_entries([QUICKSTART, longer], SMALL, seeds=[1], output=tmp_path)
    same = tmp_path / "quickstart.toml"
    same.write_text(QUICKSTART.read_text())
    with pytest.raises(ValueError, match="two configurations are called quickstart"):
        read_entries([QUICKSTART, same], SMALL, seeds=[1], output=tmp_path)
    with pytest.raises(ValueError, match="1 configurations, 0 seeds, 1 jobs"):
        compare([QUICKSTART], tmp_path, Console(), overrides=[], seeds=[], jobs=1)


def test_runs_share_an_engine_and_are_kept(tmp_path):
    """Two configurations, two seeds, one engine; a second call trains nothing."""
    other = tmp_path / "sc.toml"
    other.write_text(QUICKSTART.read_text().replace('method = "grpo"', 'method = "sc_grpo"'))
    output, told = tmp_path / "out", []
    for _ in range(2):
        console = Console(record=True, width=200)
        paths = compare([QUICKSTART, other], output, console, overrides=SMALL, seeds=[1, 2], jobs=1)
        told.append(console.export_text())
    assert told[0].count(": 2 steps, reward/mean") == 4
    assert "4 runs, 4 of them done before" in told[1] and "2 steps" not in told[1]
    found = json.loads(paths[0].read_text())
    lines = {(one["name"], one["step"]): one for one in found["curves"]["eval/accuracy"]}
    assert set(lines) == {(name, step) for name in ("quickstart", "sc") for step in (0, 2)}
    # Before any training the same weights answer the same held-out prompts.
    assert lines["sc", 0]["gain"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    logs = sorted(path.parent.parent.parent.name for path in output.glob("*/*/logs/engine.log"))
    assert logs == ["quickstart"]
