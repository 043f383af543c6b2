import time

import pytest

from megatron_credit.rewards.config import ExactConfig
from megatron_credit.rewards.find_answer import find_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1} and \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}} is it", r"\frac{1}{2}"),
        (r"\boxed{1} \boxed{2", "1"),
        (r"\boxed 5", "5"),
        (r"\fbox{3}", "3"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\}}", r"\}"),
        (r"\boxed{}", None),
        ("<answer>4</answer>", "4"),
        (r"<answer>it is \boxed{4}</answer>", "4"),
        (r"\boxed{4} <answer>5</answer>", "5"),
        (r"<answer>5</answer> \boxed{4}", "4"),
        (r"<think>\boxed{9}</think>5", "5"),
        (r"\boxed{9}</think>\boxed{5}", "5"),
        (r"<think>\boxed{9}", None),
        (r"<think>a</think>b<think>\boxed{9}", None),
        ("so 9 + 9 = 18\n#### 18", "18"),
        ("The answer is 5.\nGood luck!", "5."),
        ("Answer: 5\nmore", "5"),
        ("**Answer:** 5", "5"),
        ("Final answer:\n\n5", "5"),
        ("the answer is 4? No, the answer is 5", "5"),
        ("no\n\n7\n", "7"),
        ("the answer is", None),
        ("", None),
        (" \n ", None),
    ],
)
def test_auto(text, answer):
    assert find_answer(text, ExactConfig()) == answer


TEXT = "first\n<answer>1</answer> \\boxed{2} answer: 3\nlast"


@pytest.mark.parametrize(
    ("place", "answer"),
    [("boxed", "2"), ("tags", "1"), ("marker", "3"), ("last_line", "last"), ("whole", TEXT)],
)
def test_each_place(place, answer):
    assert find_answer(TEXT, ExactConfig(answer_in=place)) == answer
    assert find_answer(f"{TEXT}</think>", ExactConfig(answer_in=place)) is None


@pytest.mark.parametrize("place", ["boxed", "tags", "marker"])
def test_a_place_that_is_not_there_holds_no_answer(place):
    assert find_answer("just 5", ExactConfig(answer_in=place)) is None


def test_thinking_that_the_prompt_opened():
    needs = ExactConfig(needs_think_end=True)
    assert find_answer(r"hm \boxed{5}", needs) is None
    assert find_answer(r"hm</think>\boxed{5}", needs) == "5"


@pytest.mark.parametrize(
    "part",
    ["{", "}", r"\boxed{", "<answer>", "</answer>", "<think>", "answer ", "answer: ", " ", "\\"],
)
def test_time_is_linear_in_the_text(part):
    start = time.process_time()
    find_answer("answer" + part * 300_000, ExactConfig())
    assert time.process_time() - start < 5
