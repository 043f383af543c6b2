"""VeriGate: GRPO bit for bit behind a closed gate, literal numbers and a slow oracle behind it."""

import math
import random

import pytest
import torch
from credit.full_groups import changed, full_group
from credit.step_groups import (
    assert_steps,
    exact_advantages,
    random_scores,
    standardise,
    step_group,
)

from megatron_credit.credit import METHODS, assign

SCORES = [[0.5, 1.0], [0.0]]
NEARLY = [[0.1 + 0.2], [0.3]]  # differ by rounding
CREDITS = ["future_sum", "future_mean", "min"]
every_credit = pytest.mark.parametrize("credit", CREDITS)


@pytest.mark.parametrize(
    "rewards", [[1.0, 0.0, 0.0, math.nan], [0.1, 0.3, 0.2, 0.3], [0.0, -1.0, 0.0, 0.0]]
)
@pytest.mark.parametrize("gate", ["all_wrong", "any_degenerate"])
def test_rewards_that_differ_are_grpo_bit_for_bit_without_scores(rewards, gate):
    group = full_group(rewards)
    plain = changed(group, {"step_id_NT": None, "step_score_NS": None})
    result = assign("verigate", plain, gate=gate)
    assert torch.equal(result.advantage_NT, assign("grpo", group).advantage_NT)
    assert result.advantage_NT.ne(0).any()
    assert result.metrics["credit/gate_open"] == 0


def test_all_right_is_zero_without_scores():
    plain = changed(full_group([1.0, 1.0]), {"step_id_NT": None, "step_score_NS": None})
    assert assign("verigate", plain).advantage_NT.eq(0).all()


@pytest.mark.parametrize("reward", [0.0, -1.0, 0.49])
def test_all_wrong_future_sums(reward):
    # Sums 1.5, 1, 0: mean 5/6; deviations 4/6, 1/6, -5/6; std = sqrt((16 + 1 + 25) / 36 / 3).
    group = step_group(SCORES, rewards=[reward] * 2)
    std = math.sqrt(42 / 108)
    expected = [[4 / 6 / std, 1 / 6 / std], [-5 / 6 / std]]
    assert_steps(exact_advantages("verigate", group), expected)
    assert_steps(assign("verigate", group).advantage_NT[:, ::2], expected, 1e-6)
    assert assign("verigate", group).metrics["credit/gate_open"] == 1


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ({"credit": "future_mean"}, [[0.75, 1.0], [0.0]]),
        ({"discount": 0.5}, [[1.0, 1.0], [0.0]]),  # 0.5 + 0.5 x 1
        ({"discount": 0}, [[0.5, 1.0], [0.0]]),
        ({"credit": "future_mean", "discount": 0.5}, [[0.5, 1.0], [0.0]]),
        # Weights of row 1: softmax(-5, -10) = 1 / (1 + e^-5) and the rest; of row 2: 1.
        (
            {"credit": "min"},
            [
                [(0.5 + math.exp(-5)) / (1 + math.exp(-5)), math.exp(-5) / (1 + math.exp(-5))],
                [0.0],
            ],
        ),
    ],
)
def test_options(options, values):
    advantage_NS = exact_advantages("verigate", step_group(SCORES), **options)
    assert_steps(advantage_NS, standardise(values))


def test_any_degenerate_opens_for_the_right_ones_too():
    right = step_group(SCORES, rewards=[1.0, 1.0])
    opened_NT = assign("verigate", right, gate="any_degenerate").advantage_NT
    assert torch.equal(opened_NT, assign("verigate", step_group(SCORES)).advantage_NT)
    assert opened_NT.ne(0).any()


def value_oracle(row, credit, discount):
    """Of one rollout's steps, straight from the formula."""
    total = sum(math.exp(-score / 0.1) for score in row)
    scores = [s * math.exp(-s / 0.1) / total for s in row] if credit == "min" else row
    values = []
    for j in range(len(row)):
        future = sum(discount ** (k - j) * scores[k] for k in range(j, len(row)))
        values.append(future / (len(row) - j) if credit == "future_mean" else future)
    return values


@every_credit
@pytest.mark.parametrize("discount", [1.0, 0.7])
def test_against_the_oracle(credit, discount):
    rng = random.Random(credit)
    options = {"credit": credit, "discount": discount}
    for _ in range(40):
        scores = random_scores(rng)
        expected = standardise([value_oracle(row, **options) for row in scores])
        # The last rollout has no verdict: its scores are in no statistic.
        group = step_group([*scores, [9.0] * 4], rewards=[0.0] * len(scores) + [math.nan])
        assert_steps(exact_advantages("verigate", group, **options), expected, 1e-9)


@every_credit
def test_steps_of_an_open_group_have_mean_zero_and_variance_one(credit):
    group = step_group([[0.1, 0.9, 0.4], [0.3], [], [0.8, 0.7]])
    advantage_NS = exact_advantages("verigate", group, credit=credit)
    advantage_J = advantage_NS[group.step_id_NT[:, ::2] >= 0]
    assert len(advantage_J) == 6
    assert advantage_J.mean() == pytest.approx(0, abs=1e-12)
    assert advantage_J.var(correction=0) == pytest.approx(1, abs=1e-12)


def test_splitting_a_step_gains_nothing_under_future_mean():
    whole = exact_advantages("verigate", step_group([[0.5], [0.2]]), credit="future_mean")
    split = exact_advantages("verigate", step_group([[0.5, 0.5], [0.2, 0.2]]), credit="future_mean")
    assert_steps(split, [[float(whole[0, 0])] * 2, [float(whole[1, 0])] * 2])
    summed = exact_advantages("verigate", step_group([[0.5, 0.5], [0.2, 0.2]]))
    assert summed[0, 0] > summed[0, 1]


@pytest.mark.parametrize("scores", [[[0.3], [0.3], [0.3]], [[0.7], []], [[], []], NEARLY])
def test_equal_single_or_no_steps_give_exactly_zero(scores):
    result = assign("verigate", step_group(scores))
    assert result.advantage_NT.eq(0).all()
    assert result.metrics["credit/prm_failed"] == 0


def test_no_columns_of_scores():
    group = changed(step_group(SCORES), {"step_score_NS": torch.zeros(2, 0)})
    group = changed(group, {"step_id_NT": torch.full_like(group.step_id_NT, -1)})
    for credit in CREDITS:
        assert assign("verigate", group, credit=credit).advantage_NT.eq(0).all()


@every_credit
@pytest.mark.parametrize("failure", [math.nan, math.inf, -math.inf])
def test_a_step_without_a_score_closes_the_gate(credit, failure):
    result = assign("verigate", step_group([[0.5, failure], [0.0]]), credit=credit)
    assert result.advantage_NT.eq(0).all()
    assert result.metrics["credit/prm_failed"] == 1
    assert result.metrics["credit/gate_open"] == 0


def test_scores_of_no_step_and_of_no_verdict_are_never_read():
    scored = step_group([[0.5, 1.0], [0.0], [0.4]], rewards=[0.0, 0.0, math.nan])
    score_NS = scored.step_score_NS.clone()
    score_NS[1, 1], score_NS[2, 0] = math.inf, math.nan
    result = assign("verigate", changed(scored, {"step_score_NS": score_NS}))
    assert torch.equal(result.advantage_NT[:2], assign("verigate", step_group(SCORES)).advantage_NT)
    assert result.advantage_NT[2].eq(0).all()


def test_a_step_that_is_not_trained_is_no_step():
    group = step_group([[0.5, 0.25, 1.0], [0.0]])
    mask_NT = group.mask_NT.clone()
    mask_NT[0, 2] = False
    advantage_NT = assign("verigate", changed(group, {"mask_NT": mask_NT})).advantage_NT
    expected_NT = assign("verigate", step_group(SCORES)).advantage_NT
    assert torch.equal(advantage_NT[0, [0, 4]], expected_NT[0, [0, 2]])
    assert advantage_NT[0, 2] == 0


def test_a_step_beyond_the_scores_is_refused():
    group = changed(step_group(SCORES), {"step_score_NS": torch.zeros(2, 1)})
    with pytest.raises(ValueError, match="step_id_NT has id 1 on a trained token, but there are 1"):
        assign("verigate", group)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gates": "all_wrong"}, "unknown option 'gates'; did you mean 'gate'"),
        ({"credits": "min"}, "unknown option 'credits'; did you mean 'credit"),
        ({"credit": "sum"}, "credit is 'sum'; it should be 'future_sum', 'future_mean' or 'min'"),
        ({"discount": 1.5}, "discount is 1.5; it should be less than or equal to 1"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        assign("verigate", step_group(SCORES), **options)


@pytest.mark.parametrize("signal", ["step_id_NT", "step_score_NS"])
def test_missing_steps_are_named_where_they_are_needed(signal):
    group = changed(step_group(SCORES), {signal: None})
    with pytest.raises(ValueError, match=f"'verigate' needs {signal}.*it comes from the"):
        assign("verigate", group)


def test_a_group_without_two_verdicts_requires_nothing():
    method = METHODS["verigate"].configure({"gate": "any_degenerate"})
    assert method.required(full_group([math.nan])) == method.required(full_group([])) == ()
