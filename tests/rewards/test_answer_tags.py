import pytest

from megatron_credit.rewards.answer_tags import MAX_ANSWER_CHARS, exact_reward, last_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>13</answer>", "13"),
        ("6+7=13;<answer> 13\n</answer> done", "13"),
        ("<answer>1</answer><answer>2</answer>", "2"),
        ("<answer>1</answer><answer>2", "1"),
        ("<answer><answer>2</answer>", "2"),
        ("<answer>1</answer></answer>", "1"),
        ("<answer></answer>", ""),
        ("<answer>a\nb</answer>", "a\nb"),
        ("", None),
        ("13", None),
        ("<answer>13", None),
        ("13</answer>", None),
        ("</answer>13<answer>", None),
        ("<ANSWER>13</ANSWER>", None),
    ],
)
def test_last_answer(text, answer):
    assert last_answer(text) == answer


def test_time_is_linear_in_the_text():
    # a backtracking pattern takes minutes on this one
    assert last_answer("<answer>" * 500_000) is None
    assert last_answer("</answer>" * 500_000) is None


def test_partial_marks_are_no_reward():
    assert exact_reward("<answer>7</answer>", lambda answer: 0.97) == 0.0
    assert exact_reward("<answer>7</answer>", lambda answer: 1.0) == 1.0


@pytest.mark.parametrize(
    "text",
    ["", "<answer></answer>", "<answer>\u0661\u0663</answer>",
     f"<answer>{'1' * (MAX_ANSWER_CHARS + 1)}</answer>"],
)  # fmt: skip
def test_what_is_no_answer_is_not_scored(text):
    def score(answer):
        raise AssertionError(f"scored {answer!r}")

    assert exact_reward(text, score) == 0.0
