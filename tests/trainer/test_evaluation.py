"""Estimators of pass@k and maj@k against the enumeration of all sets of k answers."""

import itertools
import math
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_credit.batch.rollout import Rollout, Span
from megatron_credit.rewards.verdict import Verdict
from megatron_credit.trainer.evaluation import (
    majority_at_k,
    mean_interval,
    pass_at_k,
    share_interval,
    summarise,
)


def answer(outcome, parsed=None, *, length=3, source="", finish_reason="stop"):
    return Rollout(
        prompt_id="p",
        sample=0,
        prompt_ids=[1],
        response_ids=[2] * length,
        logprobs=[-1.0] * length,
        mask=[True] * length,
        versions=[],
        finish_reason=finish_reason,
        text="",
        answer="7",
        source=source,
        **{"reward": Verdict(outcome).reward, "outcome": outcome, "parsed": parsed},
    )


RIGHT, UNPARSED = answer("right", "7"), answer("unparsed")
TIMEOUT, ERROR = answer("timeout"), answer("error")


def wrong(parsed):
    return answer("wrong", parsed)


def mean_over_sets(items, k, value):
    """The exact mean of `value` over all sets of k items."""
    values = [value(chosen) for chosen in itertools.combinations(items, k)]
    return sum(values, Fraction(0)) / len(values)


def vote(chosen):
    """The chance that the vote of these answers is right; an answer is a name or None."""
    votes = Counter(name for name in chosen if name is not None)
    leaders = [name for name, count in votes.items() if count == max(votes.values())]
    return Fraction(sum(name.startswith("right") for name in leaders), max(len(leaders), 1))


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), st.data())
def test_pass_at_k_is_the_mean_over_all_sets(sizes, data):
    n, c = sizes
    k = data.draw(st.integers(1, n))
    outcomes = [True] * c + [False] * (n - c)
    exact = mean_over_sets(outcomes, k, lambda chosen: Fraction(any(chosen)))
    assert pass_at_k(n, c, k) == float(exact)


def test_pass_at_k_by_hand():
    assert pass_at_k(4, 1, 2) == 0.5  # 3 of the 6 pairs hold the right one
    assert pass_at_k(8, 8, 8) == 1.0
    assert pass_at_k(8, 0, 1) == 0.0


def test_pass_at_k_neither_overflows_nor_cancels():
    assert pass_at_k(10_000, 1, 3) == 3 / 10_000
    assert pass_at_k(10_000, 5_000, 5_000) == 1.0


def test_pass_at_k_has_the_right_expectation():
    n, k, p = 6, 3, Fraction(1, 3)
    chances = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    expected = sum(chance * Fraction(pass_at_k(n, c, k)) for c, chance in enumerate(chances))
    assert float(expected) == pytest.approx(float(1 - (1 - p) ** k), rel=1e-14)


counts = st.lists(st.integers(1, 3), max_size=3)


@settings(max_examples=150, deadline=None)
@given(counts, counts, st.integers(0, 2), st.data())
def test_maj_at_k_is_the_mean_over_all_sets(right, wrong_counts, silent, data):
    answers = [f"right {i}" for i, count in enumerate(right) for _ in range(count)]
    answers += [f"wrong {i}" for i, count in enumerate(wrong_counts) for _ in range(count)]
    answers += [None] * silent
    answers = answers[:9]
    if not answers:
        return
    k = data.draw(st.integers(1, len(answers)))
    votes = Counter(answers)
    found = majority_at_k(
        right=tuple(n for a, n in votes.items() if a and a.startswith("right")),
        wrong=tuple(n for a, n in votes.items() if a and a.startswith("wrong")),
        silent=votes[None],
        k=k,
    )
    assert found == float(mean_over_sets(answers, k, vote))


def test_maj_at_k_by_hand():
    # Pairs of {7, 7, 3, 4}: {7, 7} is right, {3, 4} wrong, the four {7, x} are ties.
    assert majority_at_k(right=(2,), wrong=(1, 1), silent=0, k=2) == pytest.approx(3 / 6)
    # Without an answer there is no vote, so one voice decides.
    assert majority_at_k(right=(1,), wrong=(), silent=3, k=4) == 1.0
    assert majority_at_k(right=(), wrong=(), silent=2, k=2) == 0.0


def test_too_large_k_is_refused():
    with pytest.raises(ValueError, match="pass@3 of 2 answers"):
        pass_at_k(2, 1, 3)
    with pytest.raises(ValueError, match="maj@3 of 2 answers"):
        majority_at_k(right=(1,), wrong=(1,), silent=0, k=3)


def test_summary_of_two_prompts():
    groups = [[RIGHT, RIGHT, wrong("3"), UNPARSED], [wrong("3"), wrong("3"), RIGHT, wrong("4")]]
    found = summarise(groups, (1, 2))
    assert found["pass@1"].mean == (2 / 4 + 1 / 4) / 2
    assert found["pass@2"].mean == (5 / 6 + 3 / 6) / 2
    # First: {7,7}, {7,-} twice right, {7,3} twice half, {3,-} wrong. Second: three ties of {7,x}.
    assert found["maj@2"].mean == pytest.approx(((3 + 1) / 6 + 1.5 / 6) / 2)
    assert "maj@1" not in found
    assert found["right"].mean == 3 / 8 and found["unparsed"].mean == 1 / 8
    assert found["pass@1"].num_prompts == 2


def test_answers_without_a_verdict_are_left_out_not_wrong():
    groups = [[RIGHT, TIMEOUT, ERROR, wrong("3")], [TIMEOUT, TIMEOUT, TIMEOUT, RIGHT]]
    found = summarise(groups, (1, 2))
    assert found["pass@1"].mean == (1 / 2 + 1) / 2
    assert found["pass@2"].mean == 1.0 and found["pass@2"].num_prompts == 1
    assert found["maj@2"].mean == 0.5 and found["maj@2"].num_prompts == 1
    assert found["timeout"].mean == 4 / 8 and found["error"].mean == 1 / 8


def test_a_verifier_without_normal_forms_has_no_majority():
    found = summarise([[answer("right"), answer("wrong")]], (1, 2))
    assert found["pass@2"].mean == 1.0
    assert math.isnan(found["maj@2"].mean) and found["maj@2"].num_prompts == 0


def attempts(*scores):
    """An answer of several attempts."""
    names = {1.0: "right", 0.0: "wrong"}
    last = answer(names.get(scores[-1], "timeout"), "7")
    last.spans["attempt"] = [Span(k, k + 1, score) for k, score in enumerate(scores)]
    return last


def test_several_attempts():
    """pass@k is that of first attempts; what the later ones add is Verification@k."""
    unknown = math.nan
    first = [attempts(0.0, 0.0, 1.0), attempts(1.0), attempts(0.0, 1.0), attempts(0.0, 0.0, 0.0)]
    second = [attempts(0.0, unknown), attempts(unknown), attempts(0.0, 0.0, 1.0), attempts(1.0)]
    found = summarise([first, second], (1, 2), max_attempts=3)
    assert found["pass@1"].mean == (1 / 4 + 1 / 3) / 2
    assert found["pass@2"].mean == (1 / 2 + 2 / 3) / 2
    assert found["verification@2"].mean == (2 / 4 + 1 / 2) / 2
    assert found["verification@3"].mean == (3 / 4 + 2 / 2) / 2
    assert found["right"].mean == (3 / 4 + 2 / 4) / 2
    assert "verification@1" not in found and "maj@2" not in found
    none = summarise([[attempts(unknown)]], (1,), max_attempts=2)
    assert none["verification@2"].num_prompts == 0


def test_lengths_and_truncation_weigh_prompts_alike():
    long = answer("unparsed", length=9, finish_reason="length")
    found = summarise([[long], [UNPARSED, UNPARSED, UNPARSED]], (1,))
    assert found["length"].mean == 6.0
    assert found["truncated"].mean == 0.5


def test_order_of_prompts_and_answers_is_irrelevant():
    groups = [[RIGHT, wrong("3"), wrong("4"), UNPARSED], [wrong("3"), RIGHT, RIGHT, TIMEOUT]]
    turned = [list(reversed(group)) for group in reversed(groups)]
    assert summarise(groups, (1, 2, 3)) == summarise(turned, (1, 2, 3))


def test_interval_of_lengths_by_hand():
    found = mean_interval([2.0, 4.0, 6.0])  # standard deviation 2
    assert found.mean == 4.0
    assert found.high - 4.0 == pytest.approx(1.959964 * 2 / math.sqrt(3))
    assert 4.0 - found.low == pytest.approx(found.high - 4.0)
    assert math.isnan(mean_interval([5.0]).low)


def test_interval_of_shares_by_hand():
    found = share_interval([1.0] * 6)  # with the added four: 8 of 10, variance 10/9 * 0.16
    assert found.mean == 1.0 and found.high == 1.0
    assert found.low == pytest.approx(0.8 - 1.959964 * math.sqrt(0.16 * 10 / 9 / 10))


@pytest.mark.parametrize("num_prompts", [10, 40, 200])
@pytest.mark.parametrize("p", [0.02, 0.1, 0.3, 0.5, 0.9])
def test_interval_covers_the_truth_in_95_of_100_cases(p, num_prompts):
    covered = 0.0
    for right in range(num_prompts + 1):
        found = share_interval([1.0] * right + [0.0] * (num_prompts - right))
        chance = math.comb(num_prompts, right) * p**right * (1 - p) ** (num_prompts - right)
        covered += chance * (found.low <= p <= found.high)
    assert covered >= 0.93  # it jumps with the number of right ones, around 0.95


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_interval_holds_its_mean(values):
    found = share_interval(values)
    assert 0 <= found.low <= found.mean <= found.high <= 1
