"""Where the credit falls: the measures against literal numbers, and the command on a small record.

The record is written by hand, so that the culprit of each response is known:
  3-5=-2; -2+0=-2; -2+6=4; 4+9=3; answer     tokens 7 8 7 6 4   culprit step 3   (twice)
  6-3=3; 3+8=1; 1-3=-2; answer               tokens 6 6 7 5     culprit step 1   (twice)
  7+6=3; 3+1=4; 4+7=1; answer                tokens 6 6 6 4     culprit step 0
  8-9=-1; -1-7=-8; -8-4=-2; answer           tokens 7 8 8 5     culprit step 2   (nobody is right)
"""

import csv
import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from trainer.localisation_record import (
    MODEL,
    WRONG_IN_ALL_WRONG,
    WRONG_IN_MIXED,
    write_records,
)
from transformers import AutoTokenizer

from megatron_credit.batch.rollout_files import read_rollouts, write_rollouts
from megatron_credit.credit import METHODS
from megatron_credit.trainer.load_config import load_config
from megatron_credit.trainer.localisation.culprits import find_cases
from megatron_credit.trainer.localisation.measure import detection, estimate, locate
from megatron_credit.trainer.localisation.raw_signal import raw_signal
from megatron_credit.trainer.localisation.record import read_record
from megatron_credit.trainer.localisation.report import aligned
from megatron_credit.trainer.localisation.rows import plan_rows
from megatron_credit.trainer.localisation.run import Request, run_benchmark

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "bench" / "credit.toml"
STEPS = torch.tensor([0, 0, 1, 1, 1, 2])
CULPRITS = {
    1: slice(22, 28),
    3: slice(22, 28),
    6: slice(6, 12),
    7: slice(6, 12),
    16: slice(0, 6),
}
"""Tokens of the culprit by place in the record."""


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def config(*overrides):
    return load_config(CONFIG, [f"policy.model={MODEL}", *overrides])


def test_credit_is_measured_by_its_size():
    found = locate(tensor(1, -1, -3, 0, -3, 2), STEPS, 1)
    # 6 of 10; means 1, 2, 2; a 0 loses to all outside, each 3 beats all three: 6 of 9 pairs.
    assert (found.mass, found.before, found.uniform) == (0.6, 0.2, 0.5)
    assert (found.rank, found.first) == (1.5, 0.5)
    assert found.auc == pytest.approx(6 / 9)
    assert found.praise == 0.0


def test_praise_is_of_the_credit_above_zero():
    assert locate(tensor(1, 0, 2, 1, -9, 0), STEPS, 1).praise == 0.75
    assert math.isnan(locate(-torch.ones(6), STEPS, 1).praise)


def test_equal_credit_says_nothing():
    found = locate(torch.full((6,), -0.3), STEPS, 2)
    assert (found.mass, found.uniform) == (pytest.approx(1 / 6), pytest.approx(1 / 6))
    assert (found.rank, found.first, found.auc) == (2.0, pytest.approx(1 / 3), 0.5)


@pytest.mark.parametrize("credit_T", [torch.zeros(6), tensor(1, 2, math.nan, 0, 0, 0)])
def test_no_credit_has_no_place(credit_T):
    found = locate(credit_T, STEPS, 0)
    measures = (found.mass, found.before, found.rank, found.first, found.auc, found.praise)
    assert all(map(math.isnan, measures))
    assert found.uniform == pytest.approx(1 / 3)


def test_a_lower_step_has_a_higher_rank():
    found = locate(tensor(5, 5, 1, 1, 1, 3), STEPS, 1)
    assert (found.rank, found.first, found.mass) == (3.0, 0.0, pytest.approx(3 / 16))


@pytest.mark.parametrize(
    ("scores", "culprits", "expected"),
    [
        ([1, 2, 3, 4], [0, 0, 1, 1], 1.0),
        ([4, 3, 2, 1], [0, 0, 1, 1], 0.0),
        ([1, 2, 2, 3], [0, 1, 0, 1], 0.875),
        ([2, 2, 2], [1, 0, 0], 0.5),
    ],
)
def test_detection_counts_ties_half(scores, culprits, expected):
    assert detection(tensor(*scores), torch.tensor(culprits, dtype=torch.bool)) == expected


def test_detection_needs_both_kinds():
    assert math.isnan(detection(torch.ones(2), torch.ones(2, dtype=torch.bool)))
    assert math.isnan(detection(torch.ones(2), torch.zeros(2, dtype=torch.bool)))


def test_the_interval_is_over_groups():
    value_R, group_R = tensor(0, 0, 0, 1), torch.tensor([7, 7, 7, 9])
    found = estimate(value_R, group_R, seed=3)
    # Two groups drawn: both the first (0), one of each (1/4), both the second (1).
    assert (found.mean, found.low, found.high, found.count) == (0.25, 0.0, 1.0, 4)
    assert estimate(value_R, group_R, seed=3) == found


def test_the_interval_narrows_with_the_number_of_groups():
    value_R = torch.arange(400) % 2
    found = estimate(value_R.double(), torch.arange(400), seed=0)
    # 1.96 standard errors of a fair coin thrown 400 times are 0.049.
    assert found.high - found.mean == pytest.approx(0.049, abs=0.006)
    assert found.mean - found.low == pytest.approx(0.049, abs=0.006)


def test_values_that_mean_nothing_are_left_out():
    found = estimate(tensor(math.nan, 0.5, 0.5), torch.tensor([0, 1, 2]), seed=0)
    assert (found.mean, found.low, found.high, found.count) == (0.5, 0.5, 0.5, 2)
    assert estimate(tensor(math.nan), torch.tensor([0]), seed=0).count == 0


@pytest.mark.parametrize(
    ("needs", "expected"),
    [
        (("teacher_kl_NT", "reference_index_N"), [0.5, 0.0]),
        (("positive_logprob_NT", "negative_logprob_NT", "policy_logprob_NT"), [2.0, 3.0]),
        (("positive_logprob_NT", "policy_logprob_NT"), [1.0, 0.5]),
        (("contrast_target_NT", "contrast_mean_NT", "contrast_cost_NT"), [0.0, 0.25]),
        (("saliency_NT", "answer_part_NT"), [4.0, 5.0]),
        (("teacher_logprob_NT", "policy_logprob_NT"), None),
        (("step_id_NT", "step_score_NS"), None),
        ((), None),
    ],
)
def test_the_signal_behind_the_credit(needs, expected):
    values = {
        "teacher_kl": [0.5, -1e-9],
        "positive_logprob": [-1.0, -2.0],
        "negative_logprob": [-3.0, -5.0],
        "policy_logprob": [-2.0, -2.5],
        "contrast_target": [0.5, 0.25],
        "contrast_mean": [0.25, 0.5],
        "saliency": [4.0, 5.0],
    }
    found = raw_signal(values, needs)
    assert (None if found is None else found.tolist()) == expected


def test_columns_stand_below_each_other():
    assert aligned([("a", "bb", "c"), ("aaa", "b", "")]) == ["a    bb  c", "aaa  b"]


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    path = tmp_path_factory.mktemp("localisation") / "rollouts"
    write_records(path)
    return path


def test_culprits_are_found_in_wrong_responses_only(record):
    groups = read_record(config(), record / "tags").groups
    found = find_cases(groups, AutoTokenizer.from_pretrained(MODEL))
    assert [(case.group, case.sample, case.culprit) for case in found["mixed"]] == [
        (0, 1, 3),
        (0, 3, 3),
        (1, 2, 1),
        (1, 3, 1),
        (4, 0, 0),
    ]
    assert [case.culprit for case in found["all_wrong"]] == [2, 2, 2, 2]
    assert len(found["mixed"]) == WRONG_IN_MIXED
    assert len(found["all_wrong"]) == WRONG_IN_ALL_WRONG
    counts = torch.tensor(found["mixed"][0].steps).bincount().tolist()
    # The token that ends the response belongs to the answer.
    assert counts == [7, 8, 7, 6, 4]


def test_every_method_has_a_row_or_a_reason():
    rows, refused = plan_rows(config(), None, has_average=True)
    named = {row.config.credit.method for row in rows} | {one.method for one in refused}
    assert named == set(METHODS)
    places = {row.label: (row.form, row.groups) for row in rows}
    assert places["sc_grpo"] == places["verpo w"] == ("tags", "mixed")
    assert places["grail"] == places["rredcot"] == ("boxed", "mixed")
    assert places["verigate"] == ("tags", "all_wrong")
    assert {one.method for one in refused} == {
        *("cal_grpo", "attempt_naive", "opd", "opsd", "sdpo", "srpo")
    }


def test_sections_go_to_the_methods_that_read_them():
    rows, _ = plan_rows(
        config("evidence.teacher.kind=frozen", "evidence.baseline=teacher"), None, has_average=True
    )
    read = {row.label: row.config for row in rows}
    assert read["sc_grpo"].evidence.baseline == "teacher"
    assert read["cepo"].evidence.baseline == "policy"
    assert read["cepo"].evidence.teacher.kind == "frozen"
    assert read["grpo"].evidence.teacher is None
    assert read["rredcot"].probes.segmenter.min_tokens == 4
    assert read["grail"].probes.segmenter.min_tokens != 4
    assert read["verigate"].prm.step_separator == ";" and read["sc_grpo"].prm is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ["sc_gpro"]}, "unknown method 'sc_gpro'; did you mean 'sc_grpo'"),
        ({"methods": ["cal_grpo", "sdpo"]}, "no method is left to measure: gives credit to whole"),
        ({"rollouts": Path("absent")}, "there is no rollout record at absent"),
        ({"model": "absent"}, "absent is no model directory"),
        ({"reference_model": Path("absent")}, "absent"),
        ({"output": CONFIG}, "cannot be a directory"),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_starts(tmp_path, changes, message):
    request = dataclasses.replace(Request(config=config(), output=tmp_path / "out"), **changes)
    with pytest.raises(ValueError, match=message):
        run_benchmark(request, None)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["attempts.max_attempts=2"], "leave .attempts. out"),
        (["evidence.baseline=teacher"], "compares a teacher with itself"),
    ],
)
def test_settings_that_do_not_fit(tmp_path, overrides, message):
    request = Request(config=config(*overrides), output=tmp_path, methods=["sc_grpo"])
    with pytest.raises(ValueError, match=message):
        run_benchmark(request, None)


def test_a_record_of_something_else(tmp_path, record):
    rollouts = list(read_rollouts(record / "tags" / "step-000001.jsonl"))
    unknown = [dataclasses.replace(rollout, metadata={}) for rollout in rollouts]
    write_rollouts(tmp_path / "unknown.jsonl", unknown)
    request = Request(
        config=config(),
        output=tmp_path / "out",
        rollouts=tmp_path / "unknown.jsonl",
        methods=["grpo"],
    )
    with pytest.raises(ValueError, match="has no 'expression' in its metadata"):
        run_benchmark(request, None)
    with pytest.raises(ValueError, match="answers in tags, but these methods need them in boxed"):
        run_benchmark(dataclasses.replace(request, methods=["grail"]), None)


def bench(output, record, methods):
    command = [sys.executable, "-m", "megatron_credit.cli", "bench", "credit", str(output)]
    options = ["--rollouts", str(record), "--model", str(MODEL), "--methods", methods]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, cwd=ROOT, env=os.environ, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return json.loads((output / "credit.json").read_text()), done.stdout


@pytest.fixture(scope="module")
def measured(record, tmp_path_factory):
    output = tmp_path_factory.mktemp("measured")
    methods = "grpo,cal_grpo,grail,rredcot,verigate,verpo,sc_grpo,cepo,rlcsd,grpo_process"
    return output, *bench(output, record, methods)


def row(measured, name):
    return next(one for one in measured[1]["results"] if one["method"] == name)


def test_the_same_for_all_tokens_is_the_share_of_the_tokens(measured):
    found = row(measured, "grpo")["credit"]
    share = (6 / 32 + 6 / 32 + 6 / 24 + 6 / 24 + 6 / 22) / 5
    assert found["mass"]["mean"] == pytest.approx(share, abs=1e-12)
    assert found["uniform"]["mean"] == pytest.approx(share, abs=1e-12)
    assert found["auc"]["mean"] == 0.5
    assert found["rank"]["mean"] == pytest.approx((3 + 3 + 2.5 + 2.5 + 2.5) / 5)
    assert found["first"]["mean"] == pytest.approx((0.2 + 0.2 + 0.25 + 0.25 + 0.25) / 5)


def test_verigate_is_measured_where_nobody_is_right(measured):
    found = row(measured, "verigate")
    assert (found["groups"], found["rollouts"]) == ("all_wrong", WRONG_IN_ALL_WRONG)
    # Scores 1 1 0 0, so steps are worth 2 1 0 0: minus their mean .75, over one spread.
    sizes = [7 * 1.25, 8 * 0.25, 8 * 0.75, 5 * 0.75]
    assert found["credit"]["mass"]["mean"] == pytest.approx(sizes[2] / sum(sizes), rel=1e-6)
    assert found["credit"]["praise"]["mean"] == 0.0
    assert found["credit"]["rank"]["mean"] == 2.5


def test_bounded_weights_bound_the_mass(measured):
    found = row(measured, "cepo")["credit"]["mass"]["mean"]
    # Weights of CEPO lie between 3/4 and 5/4 at its first step.
    shares = [6 / 32, 6 / 32, 6 / 24, 6 / 24, 6 / 22]
    highest = sum(5 * one / (5 * one + 3 * (1 - one)) for one in shares) / 5
    lowest = sum(3 * one / (3 * one + 5 * (1 - one)) for one in shares) / 5
    assert lowest < found < highest


def test_both_sides_of_verpo(measured):
    weight, advantage = row(measured, "verpo w"), row(measured, "verpo (advantage mode)")
    assert advantage["signal"] == weight["signal"]
    rollouts = list(read_rollouts(measured[0] / "credit" / "verpo-w.jsonl"))
    masses, shares = [], []
    for number, culprit in CULPRITS.items():
        weight_T = tensor(*rollouts[number].token_values["evidence_weight"])
        assert weight_T.min() >= 0 and weight_T.max() < 1
        # The advantage is A (1 + w) with the same A for all tokens.
        masses.append(((1 + weight_T)[culprit].sum() / (1 + weight_T).sum()).item())
        if weight_T.any():
            shares.append((weight_T[culprit].sum() / weight_T.sum()).item())
    assert advantage["credit"]["mass"]["mean"] == pytest.approx(sum(masses) / 5, rel=1e-6)
    assert weight["credit"]["mass"]["mean"] == pytest.approx(sum(shares) / len(shares), rel=1e-6)
    assert weight["credit"]["mass"]["count"] == len(shares) > 0


def test_signals_are_those_of_the_rollouts(measured):
    rollouts = list(read_rollouts(measured[0] / "credit" / "sc_grpo.jsonl"))
    found = row(measured, "sc_grpo")["signal"]["mass"]
    assert found["count"] == 5, "each of these has a verified sibling"
    values = []
    for number, culprit in CULPRITS.items():
        kl_T = tensor(*rollouts[number].token_values["teacher_kl"])
        values.append((kl_T[culprit].sum() / kl_T.sum()).item())
    assert found["mean"] == pytest.approx(sum(values) / 5, rel=1e-9)


def test_what_is_written(measured):
    output, report, text = measured
    assert [one["form"] for one in report["records"]] == ["tags", "boxed"]
    assert report["records"][0]["rollouts"] == 20 and report["records"][0]["right"] == 0.55
    assert [one["method"] for one in report["not_measured"]] == ["cal_grpo"]
    with (output / "credit.csv").open() as file:
        lines = list(csv.DictReader(file))
    names = [one["method"] for one in report["results"]]
    assert [line["method"] for line in lines] == names
    assert float(lines[0]["credit_mass_mean"]) == report["results"][0]["credit"]["mass"]["mean"]
    assert all(f"| {name}" in (output / "credit.md").read_text() for name in names)
    assert (output / "credit.png").read_bytes().startswith(b"\x89PNG")
    assert "cal_grpo: not measured" in text and "verigate*" in text


def test_a_method_alone_on_the_same_record_is_the_same(measured, record, tmp_path):
    again, _ = bench(tmp_path, record, "sc_grpo")
    assert again["results"] == [row(measured, "sc_grpo")]
