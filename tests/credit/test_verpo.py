"""VERPO: literal numbers, laws of the controller, and a slow oracle."""

import math

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

ALPHA, EPSILON = 0.0025, 2.5e-5


def contrast_group(rewards, target, mean, cost):
    return small_group(
        rewards, contrast_target_NT=target, contrast_mean_NT=mean, contrast_cost_NT=cost
    )


TWO = contrast_group(
    [1.0, 0.0],
    target=[[0.3, -0.1], [0.3, -0.1]],
    mean=[[0.1, 0.1], [0.1, 0.1]],
    cost=[[0.04, 0.04], [0.04, -1.0]],
)
# A = .5, -.5. Benefits .5 x .2 = .1, .5 x -.2 < 0; -.1 < 0, .1. The price is .0025 x .04 + .000025
# = .000125, and .000025 where the cost is negative: .1 / .100125, .1 / .100025.
TWO_WEIGHTS = [[0.1 / 0.100125, 0.0], [0.0, 0.1 / 0.100025]]


def test_the_controller_follows_evidence_that_agrees_with_the_verdict():
    result = assign("verpo", TWO)
    for row, expected in zip(result.evidence_weight_NT.tolist(), TWO_WEIGHTS, strict=True):
        assert row == pytest.approx(expected, abs=1e-7)
    assert result.evidence_mask_NT.all()
    assert result.advantage_NT.tolist() == [[0.5, 0.5], [-0.5, -0.5]]
    expected = (TWO_WEIGHTS[0][0] + TWO_WEIGHTS[1][1]) / 4
    assert result.metrics["credit/controller_mean"] == pytest.approx(expected)
    assert result.metrics["credit/controller_on"] == 0.5
    assert result.metrics["credit/no_evidence_rollouts"] == 0


def test_in_advantage_mode_it_multiplies_the_advantage():
    first, second = exact("verpo", TWO, mode="advantage", lambda_adv=2.0)
    assert first == pytest.approx([0.5 * (1 + 2 * TWO_WEIGHTS[0][0]), 0.5], abs=1e-12)
    assert second == pytest.approx([-0.5, -0.5 * (1 + 2 * TWO_WEIGHTS[1][1])], abs=1e-12)
    weight_NT = assign("verpo", TWO, mode="advantage").evidence_weight_NT
    assert torch.equal(weight_NT, assign("verpo", TWO).evidence_weight_NT)


def test_a_row_without_evidence_keeps_its_advantage():
    rows = [[0.3, 0.3], [NAN, 0.3], [0.3, math.inf], [0.3, 0.3], [0.3, 0.3]]
    others = [[0.0, 0.0]] * 3
    group = contrast_group(
        [1.0, 1.0, 1.0, 0.0, NAN],
        target=rows,
        mean=[*others, [0.6, NAN], [0.0, 0.0]],
        cost=[*others, [0.0, 0.0], [0.0, 0.0]],
    )
    result = assign("verpo", group, mode="advantage", lambda_adv=1)
    assert result.evidence_mask_NT.tolist() == [[True] * 2, *[[False] * 2] * 3, [True] * 2]
    assert result.evidence_weight_NT[1:].eq(0).all()
    assert result.evidence_weight_NT[0].gt(0.9).all()
    assert result.advantage_NT[1:].tolist() == [[0.25, 0.25], [0.25, 0.25], [-0.75, -0.75], [0, 0]]
    assert result.metrics["credit/no_evidence_rollouts"] == 3


@pytest.mark.parametrize("reward", [0.0, 1.0])
@pytest.mark.parametrize("mode", ["loss", "advantage"])
def test_equal_rewards_leave_the_reference_term_only(reward, mode):
    group = contrast_group([reward] * 2, *[[[0.4, -0.4]] * 2] * 3)
    result = assign("verpo", group, mode=mode)
    assert result.advantage_NT.eq(0).all() and result.evidence_weight_NT.eq(0).all()
    assert result.evidence_mask_NT.all()


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e30])
def test_the_weight_is_in_zero_to_one_and_zero_without_benefit(seed, scale):
    group = random_group(seed)
    target_NT = scale * group.contrast_target_NT
    group = changed(group, {"contrast_target_NT": target_NT})
    weight_NT = assign("verpo", group).evidence_weight_NT
    assert weight_NT.ge(0).all() and weight_NT.lt(1).all()
    advantage_NT = assign("dr_grpo", group).advantage_NT
    benefit_NT = advantage_NT * (target_NT - group.contrast_mean_NT)
    active_NT = assign("verpo", group).evidence_mask_NT
    assert torch.equal(weight_NT > 0, (benefit_NT > 0) & active_NT)
    moved_NT = assign("verpo", group, mode="advantage").advantage_NT
    assert torch.equal(moved_NT.sign(), advantage_NT.sign())


def oracle(group, base, mode, gain, alpha, epsilon):
    advantages, weights, active = [], [], []
    signals = zip(
        baseline(base, group.reward_N.tolist()),
        trained(group, "contrast_target_NT"),
        trained(group, "contrast_mean_NT"),
        trained(group, "contrast_cost_NT"),
        strict=True,
    )
    for advantage, target, mean, cost in signals:
        has_evidence = finite(target, mean, cost)
        weight = [0.0] * len(target)
        if has_evidence:
            for t in range(len(target)):
                benefit = max(advantage * (target[t] - mean[t]), 0)
                weight[t] = benefit / (benefit + alpha * max(cost[t], 0) + epsilon)
        factor = gain if mode == "advantage" else 0
        advantages.append([advantage * (1 + factor * w) for w in weight])
        weights.append(weight)
        active.append([float(has_evidence)] * len(target))
    return advantages, weights, active


@pytest.mark.parametrize("seed", range(150))
def test_against_the_oracle(seed):
    group = random_group(seed)
    base = ["dr_grpo", "grpo", "rloo"][seed % 3]
    mode = ["loss", "advantage"][seed % 2]
    gain, alpha, epsilon = [(1.0, ALPHA, EPSILON), (0.3, 0.1, 0.01)][seed // 2 % 2]
    options = {"lambda_adv": gain, "cost_alpha": alpha, "cost_epsilon": epsilon}
    result = assign("verpo", group, base=base, mode=mode, **options)
    advantages, weights, active = oracle(group, base, mode, gain, alpha, epsilon)
    if result.metrics["group/singleton"]:
        weights = active = [[0.0] * len(row) for row in weights]
    assert_trained(result.advantage_NT, group.mask_NT, advantages)
    assert_trained(result.evidence_weight_NT, group.mask_NT, weights)
    assert_trained(result.evidence_mask_NT.float(), group.mask_NT, active)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lambda": 1.0}, "unknown option 'lambda'; did you mean 'lambda_adv'"),
        ({"mode": "lw"}, "mode is 'lw'; it should be 'loss' or 'advantage'"),
        ({"cost_epsilon": 0.0}, "cost_epsilon is 0.0; it should be greater than 0"),
        ({"contrast": "fec"}, "unknown option 'contrast'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        assign("verpo", TWO, **options)
