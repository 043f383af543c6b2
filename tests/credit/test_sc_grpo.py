"""SC-GRPO: literal numbers, every row of the table of cases, and a slow oracle."""

import math
import random
from statistics import mean, stdev

import numpy
import pytest
import torch
from credit.evidence_groups import (
    NAN,
    assert_trained,
    baseline,
    exact,
    finite,
    random_group,
    small_group,
    trained,
)
from credit.full_groups import changed

from megatron_credit.credit import assign
from megatron_credit.credit.percentile import percentile

NONE_ROW = [NAN, NAN]
PARTIAL = {"rewards": [1.0, 1.0, 0.0], "teacher_kl_NT": [[0.1, 0.3], [0.0, 0.1], NONE_ROW]}
# Nobody is verified; the first rollout is the reference of the next two, the last has none.
ALL_WRONG = {
    "rewards": [0.0, 0.4, 0.0, 0.0],
    "teacher_kl_NT": [NONE_ROW, [0.1, 0.3], [0.3, 0.0], NONE_ROW],
    "reference_index_N": [-1, 0, 0, -1],
}


def close(rows, expected):
    for row, values in zip(rows, expected, strict=True):
        assert row == pytest.approx(values, abs=1e-12)


def test_two_of_three_verified():
    group = small_group(**PARTIAL, kl_scale=0.1)
    # A = 1/3, 1/3, -2/3; f = .1/.2, .3/.4; 0, .1/.2; the last row has no evidence and keeps A.
    expected = [[1 / 6, 1 / 4], [0, 1 / 6], [-2 / 3, -2 / 3]]
    close(exact("sc_grpo", group, base="dr_grpo"), expected)
    metrics = assign("sc_grpo", group).metrics
    assert metrics["credit/no_evidence_rollouts"] == 1 and metrics["credit/kl_scale"] == 0.1
    assert metrics["credit/weight_mean"] == pytest.approx((0.5 + 0.75 + 0 + 0.5) / 4)


def test_the_scale_is_a_percentile_of_the_group_where_none_is_given():
    # Of 0, .1, .1, .3 the 75th is .1 + .25 x .2 = .15: f = .1/.25, .3/.45; 0, .1/.25.
    expected = [[0.4 / 3, 2 / 9], [0, 0.4 / 3], [-2 / 3, -2 / 3]]
    close(exact("sc_grpo", small_group(**PARTIAL), base="dr_grpo"), expected)
    # The largest, .3: f = .1/.4, .3/.6; 0, .1/.4.
    expected = [[1 / 12, 1 / 6], [0, 1 / 12], [-2 / 3, -2 / 3]]
    close(exact("sc_grpo", small_group(**PARTIAL), base="dr_grpo", percentile=100), expected)


def test_the_scale_has_a_least_value():
    # f = .1/.4, .3/.6; 0, .1/.4 of c_min = .3, though the group's scale is smaller.
    expected = [[1 / 12, 1 / 6], [0, 1 / 12], [-2 / 3, -2 / 3]]
    for scale in (0.0, 0.2, None):
        group = small_group(**PARTIAL, kl_scale=scale)
        close(exact("sc_grpo", group, base="dr_grpo", c_min=0.3), expected)


def test_normalised_factors_have_a_mean_of_one():
    # f = .5, .75, 0, .5 by their mean, 1.75 / 4.
    group = small_group(**PARTIAL, kl_scale=0.1)
    expected = [[1 / 6 / 0.4375, 1 / 4 / 0.4375], [0, 1 / 6 / 0.4375], [-2 / 3, -2 / 3]]
    close(exact("sc_grpo", group, base="dr_grpo", normalise=True), expected)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("kl_scale", [None, 0.0, 0.1])
def test_a_teacher_that_agrees_with_the_student_leaves_nothing(normalise, kl_scale):
    zero_NT = [[0.0, -1e-9]] * 3
    partial = small_group(PARTIAL["rewards"], teacher_kl_NT=zero_NT, kl_scale=kl_scale)
    nobody = small_group([0.0, 0.2, 0.1], teacher_kl_NT=zero_NT, reference_index_N=[-1, 0, 0])
    for group in (partial, nobody):
        assert assign("sc_grpo", group, normalise=normalise).advantage_NT.eq(0).all()


@pytest.mark.parametrize("base", ["grpo", "rloo"])
@pytest.mark.parametrize("rewards", [[1.0, 0.0, 0.2], [1.0, 0.5, 0.7], [1.0, 1.0, 1.0]])
def test_one_or_all_verified_is_the_baseline_bit_for_bit(rewards, base):
    group = small_group(rewards, policy_logprob_NT=[[0.0, 0.0]] * 3)
    expected_NT = assign(base, group).advantage_NT
    assert torch.equal(assign("sc_grpo", group, base=base).advantage_NT, expected_NT)
    assert assign("sc_grpo", group).metrics["group/plain"] == 1


def test_scope_all_weighs_one_verified_too():
    kl_NT = [NONE_ROW, [0.1, 0.3], [0.0, 0.1]]
    group = small_group([1.0, 0.0, 0.0], teacher_kl_NT=kl_NT, kl_scale=0.1)
    expected = [[2 / 3, 2 / 3], [-1 / 6, -1 / 4], [0, -1 / 6]]
    close(exact("sc_grpo", group, base="dr_grpo", scope="all"), expected)
    all_verified = changed(group, {"reward_N": torch.ones(3), "teacher_kl_NT": None})
    assert assign("sc_grpo", all_verified, scope="all").advantage_NT.eq(0).all()


def test_nobody_verified_rewards_divergence():
    group = small_group(**ALL_WRONG, kl_scale=0.1)
    # s = (.5 + .75) / 2, (.75 + 0) / 2; half their distance is .125, their std .25 / sqrt 2.
    unit = 0.1 * 0.125 / (0.25 / math.sqrt(2) + 1e-6)
    expected = [[0, 0], [0.5 * unit, 0.75 * unit], [-0.75 * unit, 0], [0, 0]]
    close(exact("sc_grpo", group), expected)
    close(exact("sc_grpo", group, alpha=0.2), [[2 * v for v in row] for row in expected])
    close(exact("sc_grpo", group, base="rloo"), expected)
    assert assign("sc_grpo", group).metrics["group/none_verified"] == 1
    # The factors' mean is .5: A_t doubles, s does not change.
    close(exact("sc_grpo", group, normalise=True), [[2 * v for v in row] for row in expected])


def test_rollouts_are_compared_over_the_length_of_the_reference():
    group = small_group(**ALL_WRONG, kl_scale=0.1)
    mask_NT = torch.tensor([[False, True], [True, True], [True, True], [True, True]])
    # One trained token: s = .5, .75.
    unit = 0.1 * 0.125 / (0.25 / math.sqrt(2) + 1e-6)
    expected = [[0, 0], [-0.5 * unit, -0.75 * unit], [0.75 * unit, 0], [0, 0]]
    close(exact("sc_grpo", changed(group, {"mask_NT": mask_NT})), expected)
    mask_NT[0] = False
    assert assign("sc_grpo", changed(group, {"mask_NT": mask_NT})).advantage_NT.eq(0).all()


def test_fewer_than_two_others_give_zero():
    kl_NT = torch.tensor([NONE_ROW, [0.1, 0.3], NONE_ROW, NONE_ROW])
    group = changed(small_group(**ALL_WRONG), {"teacher_kl_NT": kl_NT})
    assert assign("sc_grpo", group).advantage_NT.eq(0).all()


@pytest.mark.parametrize("own", [-1, 0])
def test_the_reference_itself_is_not_compared(own):
    values = ALL_WRONG | {
        "teacher_kl_NT": [[9.0, 9.0], *ALL_WRONG["teacher_kl_NT"][1:]],
        "reference_index_N": [own, 0, 0, -1],
    }
    group = small_group(**values, kl_scale=0.1)
    close(exact("sc_grpo", group), exact("sc_grpo", small_group(**ALL_WRONG, kl_scale=0.1)))


def oracle(group, base, scope, normalise, alpha):
    rewards = group.reward_N.tolist()
    kls, references = trained(group, "teacher_kl_NT"), group.reference_index_N.tolist()
    valid = [math.isfinite(reward) for reward in rewards]
    num_verified = sum(v and r >= 0.5 for v, r in zip(valid, rewards, strict=True))
    advantages = baseline(base, rewards)
    plain = [[a] * len(kl) for a, kl in zip(advantages, kls, strict=True)]
    if sum(valid) < 2 or num_verified == sum(valid) or (num_verified == 1 and scope == "partial"):
        return plain
    evident = [v and finite(kl) for v, kl in zip(valid, kls, strict=True)]
    pool = [kl for row, e in zip(kls, evident, strict=True) if e for kl in row]
    scale = max(float(numpy.percentile(pool, 75)) if pool else 0, 1e-4)
    factors = [
        [kl / (kl + scale) for kl in row] if e else [1.0] * len(row)
        for row, e in zip(kls, evident, strict=True)
    ]
    if num_verified == 0:
        advantages = bonus(factors, evident, references, alpha)
    average = mean(kl / (kl + scale) for kl in pool) if normalise and any(pool) else 1.0
    return [
        [a * (f / average if e else 1.0) for f in row]
        for a, row, e in zip(advantages, factors, evident, strict=True)
    ]


def bonus(factors, evident, references, alpha):
    scores = {}
    for i, row in enumerate(factors):
        count = min(len(row), len(factors[references[i]]))
        if evident[i] and references[i] >= 0 and count:
            scores[i] = mean(row[:count])
    if len(scores) < 2:
        return [0.0] * len(factors)
    middle, spread = mean(scores.values()), stdev(scores.values()) + 1e-6
    return [
        alpha * (scores[i] - middle) / spread if i in scores else 0.0 for i in range(len(factors))
    ]


@pytest.mark.parametrize("seed", range(200))
def test_against_the_oracle(seed):
    group, rng = random_group(seed), random.Random(seed)
    base, scope = rng.choice(["grpo", "dr_grpo", "rloo"]), rng.choice(["partial", "all"])
    normalise, alpha = rng.choice([True, False]), rng.choice([0.1, 0.7])
    options = {"base": base, "scope": scope, "normalise": normalise, "alpha": alpha}
    result = assign("sc_grpo", group, **options)
    expected = oracle(group, base, scope, normalise, alpha)
    assert_trained(result.advantage_NT, group.mask_NT, expected)


@pytest.mark.parametrize("percent", [0, 12.5, 75, 100])
def test_percentile_interpolates(percent):
    rng = random.Random(1)
    for count in (1, 2, 5, 40):
        values = [rng.choice([0.0, rng.random()]) for _ in range(count)]
        expected = pytest.approx(numpy.percentile(values, percent), abs=1e-15)
        assert percentile(torch.tensor(values, dtype=torch.float64), percent) == expected
    assert percentile(torch.zeros(0), percent) == 0


@pytest.mark.parametrize(
    ("rewards", "needed"),
    [
        ([1.0, 1.0, 0.0], {"teacher_kl_NT": "the self-teacher pass"}),
        (
            [0.0, 0.0, 0.0],
            {
                "teacher_kl_NT": "the self-teacher pass",
                "reference_index_N": "credit.evidence.pick_references",
            },
        ),
    ],
)
def test_missing_signals(rewards, needed):
    signals = {"teacher_kl_NT": [[0.1, 0.2]] * 3, "reference_index_N": [-1, 0, 0]}
    group = small_group(rewards, **signals)
    for signal, source in needed.items():
        message = f"'sc_grpo' needs {signal}, but the group has none; it comes from {source}"
        with pytest.raises(ValueError, match=message):
            assign("sc_grpo", changed(group, {signal: None}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"c_mn": 1.0}, "unknown option 'c_mn'; did you mean 'c_min'"),
        ({"normalize": True}, "unknown option 'normalize'; did you mean 'normalise'"),
        ({"percentile": 101.0}, "percentile is 101.0; it should be less than or equal to 100"),
        ({"scope": "none"}, "scope is 'none'; it should be 'partial' or 'all'"),
        ({"c_min": 0.0}, "c_min is 0.0; it should be greater than 0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        assign("sc_grpo", small_group(**PARTIAL), **options)


def test_bad_groups():
    with pytest.raises(ValueError, match="kl_scale is nan; expected a finite number of nats"):
        assign("sc_grpo", small_group(**PARTIAL, kl_scale=NAN))
    beyond = small_group(**(ALL_WRONG | {"reference_index_N": [-1, 0, 4, -1]}))
    with pytest.raises(ValueError, match="reference_index_N has 4, but the group has 4 rollouts"):
        assign("sc_grpo", beyond)
