from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_credit.credit.step_spans import step_ids, step_texts
from megatron_credit.tasks import solver
from megatron_credit.tasks.chain_sum import ChainSum, ChainSumConfig
from megatron_credit.tasks.chain_sum_steps import first_wrong_step, score_steps

EXPRESSION = "6 + 7 - 8 + 9"
EXACT = ["6+7=13;", "13-8=5;", "5+9=14;", "<answer>14</answer>"]


def split(text: str) -> list[str]:
    letters = list(text)
    return step_texts(letters, step_ids(letters, separator=";"))


@pytest.mark.parametrize(
    ("steps", "wrong"),
    [
        (EXACT, None),
        ([*EXACT[:3], "\\boxed{14}"], None),
        (["6 + 7 = 13;;", " 13 - 8 = 5 ;\n", "5+9=14; ", "<answer> 14 </answer>\n"], None),
        (EXACT[:2], None),  # cut off: what is there is right
        ([*EXACT[:2], "5+9=1"], 2),  # cut off within a number
        ([*EXACT[:2], "5+9="], 2),
        ([], None),
        (["6+7=3;", "3-8=-5;", "-5+9=4;", "<answer>4</answer>"], 0),
        (["6+7=13;", "13-8=15;", "15+9=14;", "<answer>14</answer>"], 1),  # right by luck
        ([*EXACT[:3], "<answer>4</answer>"], 3),
        ([*EXACT[:3], "the answer is 14"], 3),
        ([*EXACT, "14+0=14;"], 4),
        ([EXACT[0], EXACT[2]], 1),
        (["<answer>14</answer>"], 0),
        (["7+6=13;"], 0),  # another computation of the same
        (["6+7=" + "9" * 5000 + ";"], 0),
    ],
)
def test_first_wrong_step(steps, wrong):
    assert first_wrong_step(EXPRESSION, steps) == wrong
    good = len(steps) if wrong is None else wrong
    expected = [1.0] * good + [0.0] * (len(steps) - good)
    assert score_steps("asked", steps, {"expression": EXPRESSION}) == expected


def test_a_sum_of_one_number_is_its_answer():
    assert score_steps("", ["<answer>7</answer>"], {"expression": "7"}) == [1.0]
    assert score_steps("", ["<answer>8</answer>"], {"expression": "7"}) == [0.0]


def test_other_tasks_are_refused():
    with pytest.raises(ValueError, match="no 'expression' in the metadata"):
        score_steps("", ["a"], {"answer": 1})
    with pytest.raises(ValueError, match="not a chain sum"):
        score_steps("", ["a"], {"expression": "3 * 4"})


@given(st.lists(st.integers(0, 99), min_size=1, max_size=7), st.integers(0, 2**32))
def test_it_is_the_solver_that_decides(numbers, seed):
    rng = Random(seed)
    words = [f"{rng.choice('+-')} {number}" for number in numbers[1:]]
    expression = " ".join([str(numbers[0]), *words])
    question = f"Compute: {expression} ="
    assert set(
        score_steps("", split(solver.exact_solution(question)), {"expression": expression})
    ) == {1.0}
    text = solver.forgetful_solution(question, forget=0.5, rng=rng)
    steps = split(text)
    assert len(steps) == len(numbers)
    assert first_wrong_step(expression, steps) == solver.first_wrong_step(text, question)


def test_the_metadata_of_the_task_is_enough():
    task = ChainSum(ChainSumConfig(eval_size=4))
    for prompt in task.eval_prompts():
        steps = split(solver.exact_solution(prompt.messages[0]["content"]))
        assert score_steps("", steps, prompt.metadata) == [1.0] * prompt.metadata["num_terms"]
