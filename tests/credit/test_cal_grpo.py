"""CAL-GRPO and its naive baseline: literal numbers, laws, and a slow oracle."""

import math
import random

import pytest
import torch
from credit.attempt_groups import chain_group, exact_advantages
from credit.full_groups import changed

from megatron_credit.credit import METHODS, assign

CHAINS = ["1", "01", "00", "00"]
ESTIMATORS = ["calibrated", "return", "naive", "trajectory"]
STD = math.sqrt(1 / 3) + 1e-6  # unbiased, of 1, 1, 0, 0
every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS)
both_singletons = pytest.mark.parametrize("singleton", ["zero", "return"])
both_scales = pytest.mark.parametrize("scale", ["none", "prompt_std"])


def close(advantage_NK, expected, tolerance=1e-12):
    expected_NK = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(advantage_NK, expected_NK, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("options", "first", "second"),
    [
        # Two of the three that failed attempt 1 never passed: w = 2/3. 1 - 0, and 0 - 1/3.
        ({}, [2 / 3, -2 / 9, -2 / 9, -2 / 9], [0, 1, -1 / 2, -1 / 2]),
        ({"estimator": "naive"}, [1, -1 / 3, -1 / 3, -1 / 3], [0, 1, -1 / 2, -1 / 2]),
        # Won are 1, 1, 0, 0: 1 - 1/3 and 0 - 2/3; of those at attempt 2: 1, 0, 0.
        ({"estimator": "return"}, [2 / 3, 2 / 3, -2 / 3, -2 / 3], [0, 1, -1 / 2, -1 / 2]),
        (
            {"estimator": "trajectory", "scale": "prompt_std"},
            [0.5 / STD, 0.5 / STD, -0.5 / STD, -0.5 / STD],
            [0, 0.5 / STD, -0.5 / STD, -0.5 / STD],
        ),
        (
            {"scale": "prompt_std"},
            [2 / 3 / STD, -2 / 9 / STD, -2 / 9 / STD, -2 / 9 / STD],
            [0, 1 / STD, -1 / 2 / STD, -1 / 2 / STD],
        ),
    ],
)
def test_one_first_pass_one_rescue_two_lost(options, first, second):
    group = chain_group(CHAINS)
    close(exact_advantages("cal_grpo", group, **options).T, [first, second])
    rounded_NK = assign("cal_grpo", group, **options).advantage_NT[:, ::2]
    close(rounded_NK.double().T, [first, second], 1e-7)


@pytest.mark.parametrize("estimator", ESTIMATORS[:3])
def test_a_rollout_alone_gets_zero_or_its_return(estimator):
    won, lost = chain_group(["1", "1", "01"]), chain_group(["1", "1", "00"])
    for singleton, expected in (("zero", 0.0), ("return", 1.0)):
        options = {"estimator": estimator, "singleton": singleton}
        assert exact_advantages("cal_grpo", won, **options)[2, 1] == expected
        assert exact_advantages("cal_grpo", lost, **options)[2, 1] == 0


def test_the_return_of_a_rollout_alone_is_not_calibrated():
    # Alone at attempts 2 and 3; its failure of attempt 2 was rescued, so w = 0 there.
    advantage_NK = exact_advantages("cal_grpo", chain_group(["1", "001"]), singleton="return")
    close(advantage_NK, [[0, 0, 0], [0, 1, 1]])


def test_a_group_that_is_won_gets_zero_unless_naive():
    group = chain_group(["1", "01", "01"])
    # Both failures of attempt 1 were rescued: w = 0.
    assert exact_advantages("cal_grpo", group).eq(0).all()
    assert exact_advantages("cal_grpo", group, estimator="return").eq(0).all()
    assert exact_advantages("cal_grpo", group, estimator="trajectory").eq(0).all()
    close(exact_advantages("attempt_naive", group), [[1, 0], [-0.5, 0], [-0.5, 0]])
    assert exact_advantages("attempt_naive", group, scale="prompt_std").eq(0).all()
    alone = chain_group(["1", "01"])
    options = {"singleton": "return", "scale": "prompt_std"}
    assert exact_advantages("cal_grpo", alone, **options).eq(0).all()


@every_estimator
@both_singletons
@both_scales
@pytest.mark.parametrize("chains", [["1"] * 4, ["000"] * 4])
def test_all_pass_at_once_and_all_lost_give_exactly_zero(estimator, singleton, scale, chains):
    group = chain_group(chains, num_attempts=3)
    options = {"estimator": estimator, "singleton": singleton, "scale": scale}
    assert assign("cal_grpo", group, **options).advantage_NT.eq(0).all()


@pytest.mark.parametrize("estimator", ESTIMATORS[:3])
@pytest.mark.parametrize("chains", [["1", "0", "0", "1", "0"], ["1", "0"], ["1", "1", "1"]])
def test_one_attempt_is_rloo(estimator, chains):
    group = chain_group(chains)
    expected_N1 = METHODS["rloo"]().credit(group).advantage_NT[:, ::2]
    advantage_N1 = exact_advantages("cal_grpo", group, estimator=estimator)
    torch.testing.assert_close(advantage_N1, expected_N1, rtol=0, atol=1e-12)


def random_chain(rng, num_attempts):
    """A pass ends it, and sometimes the context does."""
    chain = ""
    while len(chain) < num_attempts and "1" not in chain and rng.random() < 0.9:
        chain += rng.choice("01")
    return chain


@pytest.mark.parametrize("estimator", ESTIMATORS[:3])
@both_scales
def test_advantages_of_an_attempt_sum_to_zero(estimator, scale):
    rng = random.Random(5)
    for _ in range(30):
        group = chain_group([random_chain(rng, 3) for _ in range(7)], num_attempts=3)
        sum_K = exact_advantages("cal_grpo", group, estimator=estimator, scale=scale).sum(dim=0)
        close(sum_K, [0.0] * 3)


@pytest.mark.parametrize("estimator", ESTIMATORS[:3])
def test_a_rollout_that_never_reaches_an_attempt_does_not_change_it(estimator):
    options = {"estimator": estimator}
    before_NK = exact_advantages("cal_grpo", chain_group(CHAINS), **options)
    after_NK = exact_advantages("cal_grpo", chain_group([*CHAINS, "1", "0", ""]), **options)
    assert torch.equal(after_NK[:4, 1], before_NK[:, 1])
    assert not torch.equal(after_NK[:4, 0], before_NK[:, 0])


def oracle(chains, valid, num_attempts, estimator, singleton, scale):
    """Straight from the formulas, one rollout and attempt at a time. Lists of Python floats."""
    members = [i for i, is_valid in enumerate(valid) if is_valid]
    won = [float("1" in chain) for chain in chains]
    table = [[0.0] * num_attempts for _ in chains]
    mean = sum(won[i] for i in members) / len(members)
    std = math.sqrt(sum((won[i] - mean) ** 2 for i in members) / (len(members) - 1))
    for k in range(num_attempts):
        here = [i for i in members if len(chains[i]) > k]
        failed = [i for i in here if chains[i][k] == "0"]
        weight = sum(won[i] == 0 for i in failed) / len(failed) if failed else 1.0
        for i in here:
            value = [won[j] if estimator == "return" else float(chains[j][k]) for j in here]
            own = value[here.index(i)]
            if estimator == "trajectory":
                table[i][k] = (won[i] - mean) / (std + 1e-6)
                continue
            if len(here) == 1:
                table[i][k] = won[i] if singleton == "return" else 0.0
            else:
                table[i][k] = own - (sum(value) - own) / (len(here) - 1)
                table[i][k] *= weight if estimator == "calibrated" else 1.0
            if scale == "prompt_std":
                table[i][k] *= 0.0 if std == 0 else 1 / (std + 1e-6)
    return table


@every_estimator
@both_singletons
@both_scales
def test_against_the_oracle(estimator, singleton, scale):
    rng = random.Random(f"{estimator} {singleton} {scale}")
    options = {"singleton": singleton, "scale": scale}
    for _ in range(40):
        num_attempts, num = rng.randint(1, 4), rng.randint(2, 7)
        chains = [random_chain(rng, num_attempts) for _ in range(num)]
        valid = [True, True, *(rng.random() < 0.8 for _ in range(num - 2))]
        # The value of a valid reward is not read.
        rewards = [rng.choice([0.0, 1.0, 0.3] if v else [math.nan, math.inf]) for v in valid]
        group = chain_group(chains, rewards=rewards, num_attempts=num_attempts)
        expected = oracle(chains, valid, num_attempts, estimator, **options)
        close(exact_advantages("cal_grpo", group, estimator=estimator, **options), expected)
        if estimator == "naive":
            naive_NK = assign("attempt_naive", group, **options).advantage_NT[:, ::2]
            close(naive_NK.double(), expected, 1e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("outside", [-1, -100])
def test_trained_tokens_of_no_attempt_get_zero(estimator, outside):
    group = chain_group(CHAINS)
    id_NT = group.attempt_id_NT.clone()
    id_NT[0, 0] = outside
    other = changed(group, {"attempt_id_NT": id_NT})
    advantage_NT = assign("cal_grpo", other, estimator=estimator).advantage_NT
    expected_NT = assign("cal_grpo", group, estimator=estimator).advantage_NT
    assert advantage_NT[0].eq(0).all() and expected_NT[0, 0] != 0
    assert torch.equal(advantage_NT[1:], expected_NT[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_verdicts_and_ids(dtype):
    group = chain_group(CHAINS)
    narrow = {
        "reward_N": group.reward_N.to(dtype),
        "attempt_pass_NK": group.attempt_pass_NK.to(dtype),
        "attempt_id_NT": group.attempt_id_NT.to(torch.int8),
    }
    expected_NT = assign("cal_grpo", group).advantage_NT
    assert torch.equal(assign("cal_grpo", changed(group, narrow)).advantage_NT, expected_NT)


@pytest.mark.parametrize("name", ["cal_grpo", "attempt_naive"])
def test_metrics(name):
    metrics = assign(name, chain_group([*CHAINS, "000"], rewards=[1, 1, 0, 0, 0])).metrics
    # Failed: 4, 3, 1; lost: 3, 3, 1. One rollout reached attempt 3; attempts 1 + 2 + 2 + 2 + 3.
    assert metrics["credit/attempt_weight_mean"] == pytest.approx((3 / 4 + 1 + 1) / 3)
    assert metrics["credit/attempt_weight_min"] == 0.75
    assert metrics["credit/attempts_of_one"] == 1
    assert metrics["credit/attempts_mean"] == 2
    assert metrics["credit/verification_at_k"] == pytest.approx(2 / 5)


def test_the_weight_is_one_where_nobody_failed():
    # Attempt 1: one failed and was rescued, 0; attempt 2: 1.
    metrics = assign("cal_grpo", chain_group(["1", "01"])).metrics
    assert metrics["credit/attempt_weight_mean"] == 0.5


@pytest.mark.parametrize("num_attempts", [0, 2])
def test_no_attempts_at_all(num_attempts):
    result = assign("cal_grpo", chain_group(["", ""], num_attempts=num_attempts))
    assert result.advantage_NT.eq(0).all()
    assert result.metrics["credit/attempt_weight_mean"] == 1


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("attempt_pass_NK", 0.5, r"attempt_pass_NK has 0.5; expected 1 \(passed\), 0 \(failed\)"),
        ("attempt_pass_NK", math.inf, "attempt_pass_NK has inf"),
        ("attempt_id_NT", 2, "attempt_id_NT has id 2 on a trained token, but there are 2 columns"),
    ],
)
def test_strange_attempts_are_refused_where_they_count(field, value, message):
    group = chain_group(CHAINS)
    strange = vars(group)[field].clone()
    strange[1, 0] = value
    group = changed(group, {field: strange})
    with pytest.raises(ValueError, match=message):
        assign("cal_grpo", group)
    without = torch.tensor([1.0, math.nan, 0.0, 0.0])
    assert assign("cal_grpo", changed(group, {"reward_N": without})).advantage_NT.isfinite().all()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cal_grpo", {"estimater": "naive"}, "unknown option 'estimater'; did you mean 'estim"),
        ("cal_grpo", {"estimator": "biased"}, "estimator is 'biased'; it should be 'calibrated'"),
        ("attempt_naive", {"estimator": "naive"}, "unknown option .*valid: singleton, scale"),
        ("attempt_naive", {"scale": "std"}, "scale is 'std'; it should be 'none' or 'prompt_std'"),
    ],
)
def test_bad_options_are_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        assign(name, chain_group(CHAINS), **options)


@pytest.mark.parametrize("name", ["cal_grpo", "attempt_naive"])
def test_missing_attempts_are_named_with_their_source(name):
    group = changed(chain_group(CHAINS), {"attempt_pass_NK": None})
    with pytest.raises(ValueError, match=f"'{name}' needs attempt_pass_NK.*verifier, once an att"):
        assign(name, group)
