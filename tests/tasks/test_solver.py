from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_credit.tasks.solver import (
    exact_solution,
    exact_step,
    first_wrong_step,
    forgetful_solution,
    forgetful_step,
    parse_question,
)

ASK = "State the final answer to the following arithmetic problem: "
QUESTION = ASK + "6 + 7 - 8 + 9 ="
EXACT = "6+7=13;13-8=5;5+9=14;<answer>14</answer>"


@st.composite
def questions(draw):
    numbers = draw(st.lists(st.integers(0, 99), min_size=1, max_size=7))
    operators = draw(st.lists(st.sampled_from("+-"), min_size=6, max_size=6))
    words = [
        f"{operator} {number}" for operator, number in zip(operators, numbers[1:], strict=False)
    ]
    return ASK + " ".join([str(numbers[0]), *words]) + " ="


def truth(question):
    expression = question.removeprefix(ASK).removesuffix(" =")
    return sum(int(word) for word in expression.replace("+ ", "+").replace("- ", "-").split())


def test_parse_question():
    assert parse_question(ASK + "6 + 17 - 8 =") == ((6, 17, 8), ("+", "-"))
    assert parse_question(ASK + "6 =") == ((6,), ())


@pytest.mark.parametrize("question", ["", "6 + 7", "6 * 7 =", "6 + =", ASK + "="])
def test_what_is_no_sum_is_refused(question):
    with pytest.raises(ValueError, match="not a chain sum"):
        parse_question(question)


@pytest.mark.parametrize(
    ("left", "operator", "right", "result"),
    [
        (6, "+", 7, 3),  # 13 without its carry
        (16, "+", 7, 13),  # 23 without it
        (6, "+", 3, 9),  # nothing to carry
        (13, "-", 8, 15),  # 3 - 8 borrows from the ten, which keeps its 1
        (18, "-", 3, 15),
        (3, "-", 8, -5),  # 8 - 3 with a minus: nothing to borrow
        (-6, "-", 7, -3),
        (-13, "+", 8, -15),
        (-3, "+", 12, 19),  # 12 - 3 borrows
        (-3, "+", 3, 0),
        (0, "-", 0, 0),
    ],
)
def test_forgetful_step(left, operator, right, result):
    assert forgetful_step(left, operator, right) == result


def test_exact_solution():
    assert exact_solution(QUESTION) == EXACT
    assert exact_solution(ASK + "3 - 8 =") == "3-8=-5;<answer>-5</answer>"
    assert exact_solution(ASK + "3 =") == "<answer>3</answer>"


@given(questions())
def test_the_pupil_who_forgets_nothing_is_right(question):
    solution = forgetful_solution(question, forget=0.0, rng=Random(1))
    assert solution.endswith(f"<answer>{truth(question)}</answer>")
    assert first_wrong_step(solution, question) is None


@given(questions(), st.integers(0, 2**32))
def test_a_mistake_is_one_carry_and_local(question, seed):
    solution = forgetful_solution(question, forget=0.5, rng=Random(seed))
    numbers, operators = parse_question(question)
    *steps, answer = solution.split(";")
    left, wrong = numbers[0], []
    for index, (step, operator, right) in enumerate(
        zip(steps, operators, numbers[1:], strict=True)
    ):
        prefix = f"{left}{operator}{right}="
        assert step.startswith(prefix)
        result = int(step.removeprefix(prefix))
        assert result - exact_step(left, operator, right) in (-10, 0, 10)
        if result != exact_step(left, operator, right):
            wrong.append(index)
        left = result
    assert answer == f"<answer>{left}</answer>"
    assert first_wrong_step(solution, question) == (wrong[0] if wrong else None)


def test_forgets_as_often_as_asked():
    rng = Random(0)
    question = ASK + "6 + 7 ="
    solutions = [forgetful_solution(question, forget=0.7, rng=rng) for _ in range(4000)]
    assert set(solutions) == {"6+7=3;<answer>3</answer>", "6+7=13;<answer>13</answer>"}
    # five standard errors: 5 * sqrt(.7 * .3 / 4000) = 0.036
    share = solutions.count("6+7=3;<answer>3</answer>") / 4000
    assert share == pytest.approx(0.7, abs=0.036)


@pytest.mark.parametrize(
    ("text", "step"),
    [
        (EXACT, None),
        ("6+7=3;3-8=-5;-5+9=4;<answer>4</answer>", 0),
        ("6+7=13;13-8=15;15+9=24;<answer>24</answer>", 1),
        ("6+7=13;13-8=15;15+9=14;<answer>14</answer>", 1),  # right by luck: still a wrong step
        ("6+7=13;13-8=5;5+9=4;<answer>14</answer>", 2),
        ("6+7=13;13-8=5;5+9=14;<answer>4</answer>", 3),
        ("6+7=13;13-8=5;5+9=14;<answer>14", 3),
        ("6+7=13;13-8=5;5+9=14;", 3),
        (EXACT + EXACT, 3),
        ("6+7=13;13-8=5;5+9=14;14+0=14;<answer>14</answer>", 3),
        ("6+7=13;13-8=5;<answer>5</answer>", 2),
        ("6+7=13;13-8=5;5+9=14<answer>14</answer>", 2),  # the semicolon is part of the step
        ("6+7=13;;5+9=14;<answer>14</answer>", 1),
        ("<answer>14</answer>", 0),
        ("", 0),
    ],
)
def test_first_wrong_step(text, step):
    assert first_wrong_step(text, QUESTION) == step
