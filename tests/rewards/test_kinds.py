"""The verifiers besides math, and the configuration of all."""

import time
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from megatron_credit.rewards.config import (
    ChoiceConfig,
    CustomConfig,
    ExactConfig,
    MathConfig,
    NumericConfig,
    ReasoningGymConfig,
    VerifierConfig,
)
from megatron_credit.rewards.numbers import read_number
from megatron_credit.rewards.verifier import check, make_verifier


def outcome(text: str, answer: str, config: Any, **metadata: Any) -> str:
    return check(text, answer, metadata, config).outcome


class Section(BaseModel):
    verifier: VerifierConfig


@pytest.mark.parametrize(
    ("written", "config"),
    [
        ("math", MathConfig()),
        ("my.checks:check", CustomConfig(path="my.checks:check")),
        ({"kind": "numeric", "rel_tolerance": 0.5}, NumericConfig(rel_tolerance=0.5)),
    ],
)
def test_a_verifier_is_a_table_or_a_word(written, config):
    assert Section(verifier=written).verifier == config
    assert Section(verifier=config.model_dump()).verifier == config


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("maths", "did you mean 'math'"),
        ({"kind": "Numeric"}, "did you mean 'numeric'"),
        ({"rel_tolerance": 0.1}, "needs kind"),
        ("custom", "Field required"),
        ("my.checks:", "should match pattern"),
        ({"kind": "math", "tolerance": 0.1}, "Extra inputs"),
        (3, "valid dictionary"),
    ],
)
def test_a_wrong_table_says_what_is_wrong(written, message):
    with pytest.raises(ValidationError, match=message):
        Section(verifier=written)


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("New  York", {}, "right"),
        ("new york", {}, "wrong"),
        ("new york", {"ignore_case": True}, "right"),
        ("New York.", {}, "wrong"),
        ("New York.", {"ignore_final_dot": True}, "right"),
        ("New  York", {"ignore_space": False}, "wrong"),
        ("New York City", {}, "wrong"),
    ],
)
def test_exact(text, options, expected):
    assert outcome(text, "New York", ExactConfig(**options)) == expected


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,234.5", "2469/2"), ("-3/4", "-3/4"), ("2 1/2", "5/2"), ("-2 1/2", "-5/2"),
        (r"$\dfrac{3}{4}$", "3/4"), (r"2\frac{1}{2}", "5/2"), ("50\\%", "1/2"),
        ("50 percent", "1/2"), ("$1,000", "1000"), ("-$5", "-5"), ("\u22125", "-5"),
        ("5 km/h", "5"), ("5 million", "5000000"),
        ("1.2e-3", "3/2500"), ("1.2 x 10^-3", "3/2500"), (r"1.2 \times 10^{-3}", "3/2500"),
        ("x = 5", "5"), ("**5**", "5"), ("5.", "5"), (".5", "1/2"),
    ],
)  # fmt: skip
def test_a_number_in_many_spellings(text, number):
    found = read_number(text)
    assert found is not None
    assert str(found.value) == number


@pytest.mark.parametrize(
    "text",
    ["", "abc", "3+4", "3+4=7", "5 or 6", "5 6", "12,34", "0.1.2", "5x", "2^3", "5 pi", "5 dozen",
     "1/0", "1e99999", "5 is right", "5 apples and 6 pears", "the answer 5", "9" * 300],
)  # fmt: skip
def test_what_is_no_number(text):
    assert read_number(text) is None


def test_a_long_unit_does_not_take_long():
    start = time.process_time()
    read_number("5 " + "a" * 190 + "!")
    read_number("5 " + "a " * 90 + "!")
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize(
    ("text", "answer", "options", "expected"),
    [
        ("The answer is 0.50", "1/2", {}, "right"),
        ("0.5000001", "1/2", {}, "wrong"),
        ("0.5000001", "1/2", {"abs_tolerance": 1e-6}, "right"),
        ("101", "100", {"rel_tolerance": 0.01}, "right"),
        ("102", "100", {"rel_tolerance": 0.01}, "wrong"),
        ("2e-10", "1e-10", {"rel_tolerance": 0.01}, "wrong"),
        ("5 km", "5", {}, "right"),
        ("5", "5 km", {}, "right"),
        ("5 m", "5 km", {}, "wrong"),
        ("the sum is 3+4=7", "7", {}, "unparsed"),
    ],
)
def test_numeric(text, answer, options, expected):
    assert outcome(text, answer, NumericConfig(**options)) == expected


def test_equal_numbers_have_one_normal_form():
    forms = {check(text, "3", {}, NumericConfig()).parsed for text in ("0.5", "1/2", "50%")}
    assert forms == {"1/2"}


CITIES = ["Rome", "Paris", "A Coruna"]


@pytest.mark.parametrize("text", [
    "B", "b", "(B)", "B.", "B)", "**B**", "[B]", r"\boxed{B}", r"\boxed{\text{(B)}}", "Option B",
    "The answer is B", "The correct answer is (b).", "Answer: B) Paris", "Paris", "paris.",
    "The final answer is: **B: Paris**", "<answer>B</answer>",
])  # fmt: skip
def test_a_choice_in_many_spellings(text):
    assert check(text, "B", {"choices": CITIES}, ChoiceConfig()).parsed == "B"
    assert outcome(text, "Paris", ChoiceConfig(), choices=CITIES) == "right"
    assert outcome(text, "(A)", ChoiceConfig(), choices=CITIES) == "wrong"


@pytest.mark.parametrize(
    "text", ["A or B", "A, B", "A cat", "B Rome", "D", "none", "I am not sure", "Paris or Rome"]
)
def test_what_names_no_choice(text):
    assert outcome(text, "B", ChoiceConfig(), choices=CITIES) == "unparsed"


def test_the_text_of_a_choice_may_begin_with_a_letter():
    assert check("A Coruna", "C", {"choices": CITIES}, ChoiceConfig()).parsed == "C"


@pytest.mark.parametrize(
    ("config", "answer", "metadata", "message"),
    [
        (NumericConfig(), "five", {}, "'five' is not a number"),
        (ChoiceConfig(), "D", {"choices": CITIES}, "none of the choices A, B, C"),
        (ExactConfig(), " ", {}, "is empty"),
        (ReasoningGymConfig(), "5", {}, "names"),
        (ReasoningGymConfig(), "5", {"source_dataset": "chain_sums"}, "did you mean 'chain_sum'"),
    ],
)
def test_unusable_references(config, answer, metadata, message):
    assert message in make_verifier(config).check_reference(answer, metadata)


GYM = {"source_dataset": "chain_sum", "expression": "6 + 7"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("<answer>13</answer>", "right"), ("<answer>the answer is 13</answer>", "wrong"),
     ("<answer>12</answer>", "wrong"), ("<answer></answer>", "unparsed")],
)  # fmt: skip
def test_reasoning_gym_gives_full_marks_or_none(text, expected):
    config = ReasoningGymConfig(answer_in="tags")
    assert outcome(text, "13", config, **GYM) == expected
    nested = ReasoningGymConfig(answer_in="tags", entry_key="entry", dataset="chain_sum")
    assert outcome(text, "13", nested, entry={"answer": "13", "metadata": GYM}) == expected


def test_a_custom_function_gets_the_whole_text():
    config = CustomConfig(path="rewards.unruly:check")
    assert outcome("be <think> yes", "<think> yes", config) == "right"
    assert outcome("be yes", "no", config) == "wrong"
    with pytest.raises(TypeError, match=r"it returned 0\.5"):
        check("half yes", "yes", {}, config)
