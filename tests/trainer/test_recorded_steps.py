"""Recorded rollouts as steps: which file serves which step, and what does not fit is named."""

import math
from dataclasses import replace

import pytest
from trainer.record_cases import rollout, step

from megatron_credit.batch.rollout import Span
from megatron_credit.batch.rollout_files import write_rollouts
from megatron_credit.trainer.recorded_steps import Limits, ranges, recorded_steps, step_files

LIMITS = Limits(num_groups=2, group_size=2, vocab_size=10, max_positions=5)


def prompts_of(groups):
    return [group[0].prompt_id for group in groups]


def read(record, first=1, last=1, **limits):
    return list(recorded_steps(record, replace(LIMITS, **limits), first=first, last=last))


def error(record, **arguments):
    with pytest.raises(ValueError) as caught:
        read(record, **arguments)
    return str(caught.value)


@pytest.fixture
def record(tmp_path):
    """A directory of three steps, the second in the other format."""
    write_rollouts(tmp_path / "step-000001.jsonl", step("a", "b"))
    write_rollouts(tmp_path / "step-000002.parquet", step("c", "d"))
    write_rollouts(tmp_path / "step-000003.jsonl", step("e", "f"))
    (tmp_path / "step-000004.tmp").write_text("cut off")
    return tmp_path


def test_each_step_has_its_file(record):
    found = [prompts_of(groups) for groups in read(record, 1, 3)]
    assert found == [["a", "b"], ["c", "d"], ["e", "f"]]
    assert [prompts_of(groups) for groups in read(record, 2, 2)] == [["c", "d"]]
    (groups,) = read(record)
    assert groups == [step("a"), step("b")]


def test_nothing_is_left_to_train(record):
    assert read(record, 4, 3) == []


def test_missing_steps_are_named(record):
    (record / "step-000002.parquet").unlink()
    assert "has no rollouts of step 2, 4-6 (steps 1 to 6" in error(record, last=6)


def test_two_files_of_a_step_are_refused(record):
    write_rollouts(record / "step-000002.jsonl", step("c", "d"))
    assert "has two files of step 2" in error(record)


def test_a_file_holds_the_steps_one_after_the_other(tmp_path):
    path = tmp_path / "all.jsonl"
    write_rollouts(path, step("a", "b", "c", "d", "e", "f"))
    assert [prompts_of(groups) for groups in read(path, 2, 3)] == [["c", "d"], ["e", "f"]]
    assert "ends after step 3 of 4" in error(path, last=4)


def test_the_same_prompt_twice_in_a_row_is_two_groups(tmp_path):
    write_rollouts(tmp_path / "r.jsonl", step("a", "a"))
    assert prompts_of(read(tmp_path / "r.jsonl")[0]) == ["a", "a"]


def test_a_record_that_is_not_there(tmp_path):
    assert "there are no rollouts at" in error(tmp_path / "absent")
    assert "has no rollouts of step 1 " in error(tmp_path)


@pytest.mark.parametrize(
    ("rollouts", "message"),
    [
        (step("a", size=2), "holds 1 groups; expected trainer.prompts_per_step=2"),
        (step("a", "b", size=4), "'a' has 4 rollouts; expected trainer.samples_per_prompt=2"),
        (step("a", "b")[:3], "prompt 'b' has 1 rollouts; expected"),
        ([rollout("a", 1), rollout("a", 2), *step("b")], "has samples [1, 2]; expected 0 to 1"),
        ([rollout(), rollout(sample=1, prompt_ids=[5]), *step("b")], "has different prompt_ids"),
    ],
)
def test_groups_that_do_not_fit(tmp_path, rollouts, message):
    write_rollouts(tmp_path / "step-000001.jsonl", rollouts)
    found = error(tmp_path)
    assert message in found and "step-000001.jsonl" in found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"response_ids": [8, 10]}, "has token id 10; the model's are 0 to 9"),
        ({"response_ids": [-1, 8]}, "has token id -1"),
        ({"logprobs": [-0.5, math.nan]}, "has log-prob nan at response token 1"),
        ({"logprobs": [0.6, -0.5]}, "has log-prob 0.6 at response token 0"),
        ({"reward": math.inf}, "has reward inf"),
        ({"spans": {"attempt": []}}, "has no spans of attempts"),
        ({"spans": {"attempt": [Span(0, 3, 0.0)]}}, "has attempts at [[0, 3]]; expected"),
        (
            {"spans": {"attempt": [Span(1, 2, 1.0)]}},
            "trains on response token 0, which belongs to no attempt",
        ),
        (
            {"response_ids": [8] * 3, "logprobs": [-1.0] * 3, "mask": [True] * 3},
            "has 6 tokens; the model has 5 positions",
        ),
    ],
)
def test_a_rollout_that_cannot_be_trained_on(tmp_path, changes, message):
    path = tmp_path / "step-000001.parquet"
    write_rollouts(path, [*step("a"), rollout("b"), rollout("b", 1, **changes)])
    found = error(tmp_path)
    assert f"{path}: prompt 'b', sample 1 {message}" in found


def test_no_prompt_at_all(tmp_path):
    empty = [rollout("b", sample, prompt_ids=[]) for sample in range(2)]
    write_rollouts(tmp_path / "step-000001.jsonl", [*step("a"), *empty])
    assert "prompt 'b', sample 0 has no prompt tokens" in error(tmp_path)


def test_what_is_not_trained_on_needs_no_log_prob_and_no_verdict(tmp_path):
    odd = rollout("b", 1, logprobs=[math.nan, -0.5], mask=[False, True], reward=math.nan)
    write_rollouts(tmp_path / "step-000001.jsonl", [*step("a"), rollout("b"), odd])
    assert math.isnan(read(tmp_path)[0][1][1].reward)


def test_attempts_are_read_as_they_were_written(tmp_path):
    chain = rollout(
        "b",
        1,
        prompt_ids=[5],
        response_ids=[8, 9, 7],
        logprobs=[-0.5, math.nan, -0.5],
        mask=[True, False, True],
        spans={"attempt": [Span(0, 1, 0.0), Span(2, 3, math.nan)]},
        reward=math.nan,
    )
    write_rollouts(
        tmp_path / "step-000001.jsonl", [*step("a"), rollout("b", prompt_ids=[5]), chain]
    )
    assert repr(read(tmp_path)[0][1][1]) == repr(chain)


def test_step_files_are_in_order_and_others_are_ignored(record):
    (record / "step-000010.jsonl").write_text("")
    (record / "notes.txt").write_text("")
    assert list(step_files(record)) == [1, 2, 3, 10]
    assert step_files(record / "absent") == {}


def test_ranges():
    assert ranges([1]) == "1"
    assert ranges([3, 5, 6, 7, 9, 10]) == "3, 5-7, 9-10"
