"""The parts of `eval` around its estimators: the plan, the batches, the table."""

import io

import pytest
from rich.console import Console
from trainer.record_cases import rollout

from megatron_credit.trainer.evaluate import (
    Plan,
    answered,
    cell,
    parse_ks,
    result_of,
    table_of,
    without_verdict,
)
from megatron_credit.trainer.evaluation import Estimate


def group(source, *rewards):
    """Answers of a dataset with these rewards."""
    outcomes = {1.0: "right", 0.0: "wrong"}
    return [
        rollout(source=source, reward=r, outcome=outcomes.get(r, "timeout"), parsed=str(r))
        for r in rewards
    ]


def shown(result):
    out = io.StringIO()
    Console(file=out, width=120).print(table_of(result))
    return [[part.strip() for part in line.split("│")[1:-1]] for line in out.getvalue().split("\n")]


def test_each_dataset_has_its_column():
    groups = [group("sums [easy]", 1.0, 1.0), group("words", 0.0, 1.0), group("words", 0.0, 0.0)]
    result = result_of(groups, (1, 2))
    assert {name: found["pass@1"].mean for name, found in result.datasets.items()} == {
        "sums [easy]": 1.0,
        "words": 0.25,
    }
    rows = {row[0]: row[1:] for row in shown(result) if row}
    assert [text.split()[0] for text in rows["pass@1"]] == ["0.500", "1.000", "0.250"]
    assert [text.split()[0] for text in rows["pass@2"]] == ["0.667", "1.000", "0.500"]
    assert rows["prompts"] == ["3", "1", "2"]
    assert rows["length"][1] == "2.0"  # of one prompt there is no interval


def test_one_dataset_is_no_column():
    groups = [group("", 1.0)]
    rows = shown(result_of(groups, (1,)))
    assert ["prompts", "1"] in rows


def test_cells():
    assert cell(Estimate(0.5, 0.25, 0.75, 9), 3) == "0.500 [0.250, 0.750]"
    assert cell(Estimate(float("nan"), float("nan"), float("nan"), 0), 3) == "-"


def test_answers_without_a_verdict_are_said():
    assert without_verdict([group("", 1.0, 0.0)]) == "0 of 2 answers have no verdict"
    found = without_verdict([group("", 1.0, float("nan"))])
    assert found == (
        "1 of 2 answers have no verdict: left out of all but the shares, not counted as wrong"
    )


def test_usual_ks_up_to_the_number_of_answers():
    assert parse_ks(None, 5) == (1, 2, 4)
    assert parse_ks(" 4,1,4", 5) == (1, 4)


@pytest.mark.parametrize("at_once", [1, 2, 5, 9])
def test_prompts_are_answered_in_order_in_batches(at_once):
    asked = []

    class Recording:
        def groups(self, prompts, *, num_samples, temperature, purpose):
            asked.append(len(prompts))
            return [(prompt, num_samples, temperature, purpose) for prompt in prompts]

    plan = Plan(num_samples=3, ks=(1,), temperature=0.5)
    found = [g for part in answered(Recording(), "abcde", plan, at_once=at_once) for g in part]
    assert found == [(prompt, 3, 0.5, "eval") for prompt in "abcde"]
    assert max(asked) == min(at_once, 5)
