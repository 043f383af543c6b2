"""RLCSD: literal numbers, laws, and a slow oracle."""

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

TANH1 = math.tanh(1.0)


def gap_group(rewards, gap_NT):
    """The negative teacher's log-probs are 0, so the positive one's are the gap."""
    zero_NT = [[0.0] * len(gap_T) for gap_T in gap_NT]
    return small_group(rewards, positive_logprob_NT=gap_NT, negative_logprob_NT=zero_NT)


# A = .5, -.5, 0 under dr_grpo.
THREE = gap_group([1.0, 0.0, 0.5], [[0.02, -0.02, 9.0, 1e-4], [0.02, -0.02, -9.0, 0.0], [9.0] * 4])


def test_the_bonus_never_crosses_zero():
    # u = +-.5 tanh 1 = +-.3808, +-.5 at a gap of 9, .0025 at 1e-4, which is dropped.
    u = 0.5 * TANH1
    expected = [[0.5 + u, 0.5 - u, 1.0, 0.5], [-0.5 + u, -0.5 - u, -1.0, -0.5], [0.0] * 4]
    for row, values in zip(exact("rlcsd", THREE, base="dr_grpo"), expected, strict=True):
        assert row == pytest.approx(values, abs=1e-12)
    result = assign("rlcsd", THREE)
    assert result.selected_NT.tolist() == [[True] * 3 + [False]] * 2 + [[True] * 4]
    assert result.metrics["credit/selected_tokens"] == 10 / 12
    # A bonus of up to 2 outweighs A = +-.5: 2 tanh 1 = 1.52 against it gives 0.
    large = exact("rlcsd", THREE, base="dr_grpo", lam=2.0)
    assert large[0][1] == large[1][0] == 0 and large[2] == [0.0] * 4
    assert assign("rlcsd", THREE, base="dr_grpo", lam=2.0).metrics["credit/selected_to_zero"] == (
        pytest.approx(2 / 6)
    )


def test_options_bound_the_bonus():
    capped = exact("rlcsd", THREE, base="dr_grpo", u_max=0.1)
    assert capped[0] == pytest.approx([0.6, 0.4, 0.6, 0.5], abs=1e-12)
    wide = exact("rlcsd", THREE, base="dr_grpo", tau=0.04)
    assert wide[0][0] == pytest.approx(0.5 + 0.5 * math.tanh(0.5), abs=1e-12)
    all_small = assign("rlcsd", THREE, threshold=0.5)
    assert not all_small.selected_NT.any()
    assert torch.equal(all_small.advantage_NT, assign("grpo", THREE).advantage_NT)


@pytest.mark.parametrize("missing", ["positive_logprob_NT", "negative_logprob_NT"])
def test_a_row_without_evidence_keeps_its_advantage(missing):
    lacking_NT = vars(THREE)[missing].clone()
    lacking_NT[0, 3] = NAN
    result = assign("rlcsd", changed(THREE, {missing: lacking_NT}), base="dr_grpo")
    assert result.advantage_NT[0].tolist() == [0.5] * 4
    assert not result.selected_NT[0].any() and result.selected_NT[1].any()
    assert result.metrics["credit/no_evidence_rollouts"] == 1


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_equal_rewards_stay_zero(reward):
    group = gap_group([reward] * 2, [[9.0], [-9.0]])
    assert assign("rlcsd", group).advantage_NT.eq(0).all()


@pytest.mark.parametrize("seed", range(100))
def test_against_the_oracle(seed):
    group, rng = random_group(seed), random.Random(seed)
    base = rng.choice(["grpo", "dr_grpo", "rloo"])
    lam, tau, u_max, threshold = rng.choice([(0.5, 0.02, 2, 0.02), (3.0, 1.0, 1.5, 0.5)])
    options = {"lam": lam, "tau": tau, "u_max": u_max, "threshold": threshold}
    rows = zip(
        baseline(base, group.reward_N.tolist()),
        trained(group, "positive_logprob_NT"),
        trained(group, "negative_logprob_NT"),
        strict=True,
    )
    advantages, selected = [], []
    for advantage, positive, negative in rows:
        row, chosen = [advantage] * len(positive), [0.0] * len(positive)
        for t in range(len(row) if finite(positive, negative) else 0):
            u = max(min(lam * math.tanh((positive[t] - negative[t]) / tau), u_max), -u_max)
            if abs(u) > threshold:
                chosen[t] = 1.0
                moved = advantage + u
                row[t] = moved if moved * advantage > 0 else 0.0
        advantages.append(row)
        selected.append(chosen)
    result = assign("rlcsd", group, base=base, **options)
    if result.metrics["group/singleton"]:
        selected = [[0.0] * len(row) for row in selected]
    assert_trained(result.advantage_NT, group.mask_NT, advantages)
    assert_trained(result.selected_NT.float(), group.mask_NT, selected)


def test_missing_signals_and_bad_options():
    with pytest.raises(ValueError, match=r"'rlcsd' needs negative_logprob_NT.*with bad evidence"):
        assign("rlcsd", changed(THREE, {"negative_logprob_NT": None}))
    with pytest.raises(ValueError, match="unknown option 'umax'; did you mean 'u_max'"):
        assign("rlcsd", THREE, umax=1.0)
    with pytest.raises(ValueError, match=r"tau is 0.0; it should be greater than 0"):
        assign("rlcsd", THREE, tau=0.0)
