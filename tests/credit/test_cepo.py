"""CEPO and RLSD: literal numbers, laws, schedule, fallbacks, and a slow oracle."""

import math
import random

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

LN = {ratio: math.log(ratio) for ratio in (0.8, 1.1, 1.25, 3.0)}
TWO = {
    "rewards": [1.0, 0.0],
    "positive_logprob_NT": [[-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]],
    "negative_logprob_NT": [
        [-1 - LN[1.25], -1 - LN[3.0], -1 - LN[0.8]],
        [-1 - LN[1.25], -1 - LN[3.0], -1 - LN[0.8]],
    ],
}
both = pytest.mark.parametrize("name", ["cepo", "rlsd"])
seeds = pytest.mark.parametrize("seed", range(40))


def close(rows, expected):
    for row, values in zip(rows, expected, strict=True):
        assert row == pytest.approx(values, abs=1e-12)


def one_step(gap_NT, reward_N, **signals):
    """A group whose teachers differ by this gap, the second being the policy as well."""
    other_NT = torch.zeros_like(gap_NT)
    return small_group(
        reward_N.tolist(),
        positive_logprob_NT=gap_NT.tolist(),
        negative_logprob_NT=other_NT.tolist(),
        policy_logprob_NT=other_NT.tolist(),
        **signals,
    )


def test_first_step():
    # Ratios 1.25, 3, .8 where A = .5, their inverses where A = -.5; half of them mixed in.
    right = [0.5 * (1 + 0.5 * change) for change in (0.25, 0.5, -0.2)]
    wrong = [-0.5 * (1 + 0.5 * change) for change in (-0.2, -0.5, 0.25)]
    close(exact("cepo", small_group(**TWO), base="dr_grpo"), [right, wrong])
    metrics = assign("cepo", small_group(**TWO)).metrics
    assert metrics["credit/mixing"] == 0.5
    assert metrics["credit/weight_clip_high"] == metrics["credit/weight_clip_low"] == 1 / 6


def test_the_schedule_falls_to_zero_in_steps():
    # At step 6 of 25 the mixing is .5 x .8; RLSD at step 26 of 50 has .5 x .5, with clips at .2.
    close(
        exact("cepo", small_group(**TWO, step=6), base="dr_grpo")[:1],
        [[0.5 * (1 + 0.4 * change) for change in (0.25, 0.5, -0.2)]],
    )
    values = {"rewards": TWO["rewards"], "positive_logprob_NT": TWO["positive_logprob_NT"]}
    group = small_group(**values, policy_logprob_NT=TWO["negative_logprob_NT"], step=26)
    close(
        exact("rlsd", group, base="dr_grpo")[:1],
        [[0.5 * (1 + 0.25 * change) for change in (0.2, 0.2, -0.2)]],
    )
    close(
        exact("cepo", small_group(**TWO, step=3), base="dr_grpo", lam0=1.0, T_warm=4, e_w=9.0)[:1],
        [[0.5 * (1 + 0.5 * change) for change in (0.25, 2.0, -0.2)]],
    )


@pytest.mark.parametrize(("name", "last"), [("cepo", 25), ("rlsd", 50)])
@pytest.mark.parametrize("base", ["grpo", "dr_grpo", "rloo"])
def test_without_mixing_it_is_the_baseline_and_no_teacher_is_asked(name, last, base):
    bare = small_group([1.0, 0.0, 0.0], teacher_kl_NT=[[0.0]] * 3, step=last + 1)
    expected_NT = assign(base, bare).advantage_NT
    assert torch.equal(assign(name, bare, base=base).advantage_NT, expected_NT)
    first = changed(bare, {"step": 1})
    assert torch.equal(assign(name, first, base=base, lam0=0).advantage_NT, expected_NT)
    with pytest.raises(ValueError, match=f"'{name}' needs positive_logprob_NT"):
        assign(name, changed(bare, {"step": last}))


@both
@seeds
def test_no_gap_is_the_baseline_bit_for_bit(name, seed):
    group = random_group(seed)
    same = dict.fromkeys(("negative_logprob_NT", "policy_logprob_NT"), group.positive_logprob_NT)
    for step in range(1, 26):
        group = changed(group, same | {"step": step})
        assert exact(name, group) == exact("grpo", group)


@both
@seeds
@pytest.mark.parametrize("scale", [0.3, 1e3])
def test_the_sign_stays_and_the_change_is_bounded(name, seed, scale):
    rng = torch.Generator().manual_seed(seed)
    gap_NT = scale * torch.randn(5, 6, generator=rng, dtype=torch.float64)
    reward_N = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.3])
    group = one_step(gap_NT, reward_N)
    base_NT = torch.tensor(exact("grpo", group), dtype=torch.float64)
    ratio_NT = torch.tensor(exact(name, group, e_w=0.4), dtype=torch.float64) / base_NT
    assert ratio_NT.min() >= 1 - 0.2 - 1e-12 and ratio_NT.max() <= 1 + 0.2 + 1e-12
    # A token more likely under the right answer counts more in a rollout that is above the mean.
    assert torch.equal((ratio_NT - 1).sign(), (base_NT * gap_NT).sign())


@seeds
def test_swapped_answers_invert_the_weight(seed):
    rng = torch.Generator().manual_seed(seed)
    gap_NT = torch.randn(3, 5, generator=rng, dtype=torch.float64)
    reward_N = torch.tensor([1.0, 0.0, 0.0])
    weights = []
    for sign in (1, -1):
        group = one_step(sign * gap_NT, reward_N)
        advantage_NT = torch.tensor(exact("cepo", group, lam0=1, e_w=1e9), dtype=torch.float64)
        weights.append(advantage_NT / torch.tensor(exact("grpo", group), dtype=torch.float64))
    product_NT = weights[0] * weights[1]
    # The weight was written as a change of 1, so its error is that of numbers around 1.
    torch.testing.assert_close(product_NT, torch.ones_like(product_NT), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("gap", "weight"), [(300.0, 20.0), (-300.0, -20.0)])
def test_the_exponent_is_bounded(gap, weight):
    group = one_step(torch.tensor([[gap], [0.0]]), torch.tensor([1.0, 0.0]))
    advantage = exact("cepo", group, base="dr_grpo", lam0=1, e_w=1e12)[0][0]
    assert advantage == pytest.approx(0.5 * math.exp(weight), rel=1e-9, abs=1e-12)


FALLBACK = {
    "rewards": [1.0, 0.0, 0.0, 1.0],
    "positive_logprob_NT": [[-1.0], [-1.0], [NAN], [-1.0]],
    "negative_logprob_NT": [[-1 - LN[1.1]], [NAN], [-1.0], [NAN]],
    "policy_logprob_NT": [[-9.0], [-1 - LN[1.25]], [-1.0], [NAN]],
}


def test_rows_without_a_wrong_answer_fall_back():
    group = small_group(**FALLBACK)
    first = 0.5 * (1 + 0.5 * 0.1)
    close(exact("cepo", group, base="dr_grpo"), [[first], [-0.5], [-0.5], [0.5]])
    # 1 / 1.25 - 1 = -.2; a row whose positive is missing keeps A, as does one with neither.
    second = -0.5 * (1 - 0.5 * 0.2)
    rlsd = exact("cepo", group, base="dr_grpo", fallback="rlsd")
    close(rlsd, [[first], [second], [-0.5], [0.5]])
    counts = [
        assign("cepo", group, fallback=fallback).metrics["credit/no_evidence_rollouts"]
        for fallback in ("grpo", "rlsd")
    ]
    assert counts == [3, 2]


@pytest.mark.parametrize("reward", [0.0, 1.0])
@both
def test_equal_rewards_give_zero(name, reward):
    group = one_step(torch.tensor([[0.3], [2.0]]), torch.tensor([reward] * 2))
    assert assign(name, group).advantage_NT.eq(0).all()


def oracle(group, base, negatives, start, warm, bound):
    mixing = start * max(0, 1 - (group.step - 1) / warm)
    rows = zip(
        baseline(base, group.reward_N.tolist()),
        trained(group, "positive_logprob_NT"),
        negatives,
        strict=True,
    )
    expected = []
    for advantage, positive, negative in rows:
        row = [advantage] * len(positive)
        if finite(positive, negative) and advantage:
            for t in range(len(row)):
                exponent = math.copysign(1, advantage) * (positive[t] - negative[t])
                weight = math.exp(max(min(exponent, 20), -20))
                clipped = max(min(weight, 1 + bound), 1 - bound)
                row[t] = advantage * ((1 - mixing) + mixing * clipped)
        expected.append(row)
    return expected


@pytest.mark.parametrize("seed", range(150))
def test_against_the_oracle(seed):
    group, rng = random_group(seed), random.Random(seed)
    policy, negative = trained(group, "policy_logprob_NT"), trained(group, "negative_logprob_NT")
    base, fallback = rng.choice(["grpo", "dr_grpo", "rloo"]), rng.choice(["grpo", "rlsd"])
    start, warm, bound = rng.choice([(0.5, 25, 0.5), (1.0, 70, 0.1)])
    options = {"base": base, "e_w": bound, "lam0": start, "T_warm": warm}
    substituted = [
        p if fallback == "rlsd" and not finite(n) else n
        for n, p in zip(negative, policy, strict=True)
    ]
    result = assign("cepo", group, fallback=fallback, **options)
    expected = oracle(group, base, substituted, start, warm, bound)
    assert_trained(result.advantage_NT, group.mask_NT, expected)
    result = assign("rlsd", group, **options)
    expected = oracle(group, base, policy, start, warm, bound)
    assert_trained(result.advantage_NT, group.mask_NT, expected)


@pytest.mark.parametrize(
    ("name", "options", "signal", "source"),
    [
        ("cepo", {}, "positive_logprob_NT", "the teacher pass with good evidence"),
        ("cepo", {}, "negative_logprob_NT", "the teacher pass with bad evidence"),
        ("cepo", {"fallback": "rlsd"}, "policy_logprob_NT", "a forward pass of the policy"),
        ("rlsd", {}, "positive_logprob_NT", "the teacher pass with good evidence"),
        ("rlsd", {}, "policy_logprob_NT", "a forward pass of the policy"),
    ],
)
def test_missing_signals(name, options, signal, source):
    group = changed(one_step(torch.zeros(2, 1), torch.tensor([1.0, 0.0])), {signal: None})
    message = f"'{name}' needs {signal}, but the group has none; it comes from {source}"
    with pytest.raises(ValueError, match=message):
        assign(name, group, **options)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cepo", {"lam": 0.5}, "unknown option 'lam'; did you mean 'lam0'"),
        ("cepo", {"T_warm": 0}, "T_warm is 0; it should be greater than 0"),
        ("cepo", {"lam0": 1.5}, "lam0 is 1.5; it should be less than or equal to 1"),
        ("cepo", {"fallback": "zero"}, "fallback is 'zero'; it should be 'grpo' or 'rlsd'"),
        ("rlsd", {"fallback": "grpo"}, "unknown option 'fallback'; .*valid: base, e_w"),
    ],
)
def test_bad_options(name, options, message):
    with pytest.raises(ValueError, match=message):
        assign(name, small_group(**TWO), **options)
