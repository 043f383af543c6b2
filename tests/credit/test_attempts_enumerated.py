"""The expected gradient estimate, over all outcomes of a small group, against the true gradient."""

import math
from itertools import product

import pytest
from credit.attempt_groups import chain_group, exact_advantages

# More rollouts than two make groups where nobody, one or several fail an attempt.
SIZES = [(2, 2), (3, 2), (3, 3), (4, 3)]
PASS_RATES = [0.3, 0.55, 0.8]
every_size = pytest.mark.parametrize(("num", "num_attempts"), SIZES)


def chains_of(pass_rates):
    """Every chain with its probability; the pass of an attempt depends on nothing."""
    chains, alive = {}, 1.0
    for k, rate in enumerate(pass_rates):
        chains["0" * k + "1"] = alive * rate
        alive *= 1 - rate
    return chains | {"0" * len(pass_rates): alive}


def score(chain, k, rate):
    """d log p(verdict of attempt k) / d rate."""
    if len(chain) <= k:
        return 0.0
    return 1 / rate if chain[k] == "1" else -1 / (1 - rate)


def expected_estimate(pass_rates, num, **options):
    """E[ 1/N sum_i A_ik d log p(verdict_ik) / d rate_k ] for each attempt k, exactly."""
    total = [0.0] * len(pass_rates)
    for group in product(chains_of(pass_rates).items(), repeat=num):
        chains = [chain for chain, _ in group]
        probability = math.prod(p for _, p in group) / num
        table = chain_group(chains, num_attempts=len(pass_rates))
        advantages = exact_advantages("cal_grpo", table, **options).tolist()
        for k, rate in enumerate(pass_rates):
            row = zip(chains, advantages, strict=True)
            total[k] += probability * sum(score(c, k, rate) * a[k] for c, a in row)
    return total


def true_gradient(pass_rates):
    """Of Verification@K = 1 - product of the failure rates."""
    others = [pass_rates[:k] + pass_rates[k + 1 :] for k in range(len(pass_rates))]
    return [math.prod(1 - rate for rate in rest) for rest in others]


@every_size
@pytest.mark.parametrize("estimator", ["calibrated", "return"])
def test_unbiased_where_a_rollout_alone_gets_its_return(num, num_attempts, estimator):
    rates = PASS_RATES[:num_attempts]
    estimate = expected_estimate(rates, num, estimator=estimator, singleton="return")
    assert estimate == pytest.approx(true_gradient(rates), abs=1e-12)


@every_size
def test_naive_is_off_by_the_weight(num, num_attempts):
    rates = PASS_RATES[:num_attempts]
    calibrated = expected_estimate(rates, num)
    naive = expected_estimate(rates, num, estimator="naive")
    for k in range(num_attempts):
        # What a failure at attempt k has left to lose: that no later attempt passes.
        weight = math.prod(1 - rate for rate in rates[k + 1 :])
        assert naive[k] * weight == pytest.approx(calibrated[k], abs=1e-12)


def test_zero_for_a_rollout_alone_loses_only_those_groups():
    # Both reach attempt 1; attempt 2 both with probability .7^2, one alone with 2 x .7 x .3.
    estimate = expected_estimate([0.3, 0.55], 2)
    assert estimate == pytest.approx([0.45, 0.7**2], abs=1e-12)


def rescue_gradient(estimator, num=3):
    """Expected estimate in the logits of attempt 1: pass, or one of two kinds of failure that are
    rescued with probability 1 and 0."""
    first = [0.2, 0.5, 0.3]
    total = [0.0] * 3
    for kinds in product(range(3), repeat=num):
        probability = math.prod(first[kind] for kind in kinds) / num
        table = chain_group([("1", "01", "00")[kind] for kind in kinds], num_attempts=2)
        options = {"estimator": estimator, "singleton": "return"}
        advantages = exact_advantages("cal_grpo", table, **options)[:, 0].tolist()
        for kind, advantage in zip(kinds, advantages, strict=True):
            for other in range(3):
                total[other] += probability * advantage * ((kind == other) - first[other])
    return total


def test_kinds_of_failure_that_differ_in_rescue_need_the_return_estimator():
    # Won with .7: gradients pi (chance to win - .7) = .2 x .3, .5 x .3, .3 x -.7.
    assert rescue_gradient("return") == pytest.approx([0.06, 0.15, -0.21], abs=1e-12)
    # Calibration sees one kind of failure, so it drives the rescuable one down.
    calibrated = rescue_gradient("calibrated")
    assert calibrated[0] > 0 > calibrated[1]
