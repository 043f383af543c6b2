"""The baselines against literal numbers and an exact oracle that shares no code with them."""

import math
from decimal import Decimal, localcontext
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_credit.credit import Group, assign

every_baseline = pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "rloo"])
BINARY = [1.0, 0.0, 0.0, 0.0]


def rollout_advantages(name, rewards, dtype=torch.float64):
    """The one advantage of each rollout's trained tokens; the other tokens are seen to be 0."""
    mask_NT = torch.arange(3)[None, :] != torch.arange(len(rewards))[:, None] % 3
    group = Group(reward_N=torch.tensor(rewards, dtype=dtype), mask_NT=mask_NT)
    advantage_NT = assign(name, group).advantage_NT
    assert advantage_NT[~mask_NT].eq(0).all()
    first_N2 = advantage_NT[mask_NT].view(len(rewards), 2)
    assert torch.equal(first_N2[:, 0], first_N2[:, 1])
    return first_N2[:, 0].tolist()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [1.5, -0.5, -0.5, -0.5]),  # .75 / .5, -.25 / .5
        ("dapo", [1.5, -0.5, -0.5, -0.5]),
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25]),
        ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_one_of_four_right(name, expected, dtype):
    assert rollout_advantages(name, BINARY, dtype) == pytest.approx(expected, abs=4e-6)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [1 / math.sqrt(2), 0.0, 0.0, -1 / math.sqrt(2)]),  # std of (1, 0) is 1 / sqrt 2
        ("dr_grpo", [0.5, 0.0, 0.0, -0.5]),
        ("rloo", [1.0, 0.0, 0.0, -1.0]),
    ],
)
def test_only_rollouts_with_a_verdict_count(name, expected):
    rewards = [1.0, math.nan, -math.inf, 0.0]
    assert rollout_advantages(name, rewards) == pytest.approx(expected, abs=2e-6)


def oracle(name, rewards):
    """Exact rational arithmetic, rounded once."""
    valid = [Fraction(reward) for reward in rewards if math.isfinite(reward)]
    if len(valid) < 2 or len(set(valid)) == 1:
        return [0.0] * len(rewards)
    mean = sum(valid) / len(valid)
    variance = sum((r - mean) ** 2 for r in valid) / (len(valid) - 1)
    with localcontext(prec=60):
        root = Fraction((Decimal(variance.numerator) / Decimal(variance.denominator)).sqrt())
    rules = {
        "grpo": lambda r: (r - mean) / (root + Fraction("1e-6")),
        "dr_grpo": lambda r: r - mean,
        "rloo": lambda r: r - (sum(valid) - r) / (len(valid) - 1),
    }
    rule = rules["grpo" if name == "dapo" else name]
    return [float(rule(Fraction(r))) if math.isfinite(r) else 0.0 for r in rewards]


no_verdict = st.sampled_from([math.nan, math.inf, -math.inf])
ordinary = st.one_of(st.sampled_from([0.0, 1.0, 0.1 + 0.2, 0.3]), st.floats(-10, 10), no_verdict)
huge = st.one_of(st.sampled_from([1e30, -1e30, 3e37]), st.floats(-1e30, 1e30), no_verdict)
nearly_equal = st.builds(lambda steps: 1e6 + steps * 2.0**-33, st.integers(-4, 4))
tiny = st.floats(-1e-300, 1e-300)


@every_baseline
@settings(deadline=None, max_examples=200)
@given(
    rewards=st.one_of(
        *(st.lists(kind, min_size=1, max_size=16) for kind in (ordinary, huge, nearly_equal, tiny))
    )
)
def test_against_the_oracle(name, rewards):
    expected = oracle(name, rewards)
    scale = max(1.0, *map(abs, expected))
    assert rollout_advantages(name, rewards) == pytest.approx(expected, abs=1e-6 * scale, rel=1e-6)


def test_differences_in_the_last_digits_are_not_rounded_away():
    # A mean taken at 1e10 is off by up to 1e-6, as much as the differences themselves.
    step = math.ulp(1e10)
    rewards = [1e10, 1e10, 1e10 + step]
    expected = [-step / 3, -step / 3, 2 * step / 3]
    assert rollout_advantages("dr_grpo", rewards) == pytest.approx(expected, rel=1e-6)


def test_rewards_that_differ_by_one_ulp_are_not_equal():
    low, high = 1.0, math.nextafter(1.0, 2.0)
    advantages = rollout_advantages("dr_grpo", [low, high])
    assert advantages == pytest.approx([-(high - low) / 2, (high - low) / 2], rel=1e-6)


def test_grpo_at_the_end_of_float64():
    # Squares of these overflow; the answer does not depend on the scale.
    rewards = [1.7e308, -1.7e308, -1.7e308, -1.7e308]
    assert rollout_advantages("grpo", rewards) == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-6)


@every_baseline
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_advantages_of_the_largest_rewards_are_finite(name, dtype):
    largest = torch.finfo(dtype).max
    advantages = rollout_advantages(name, [largest, -largest, -largest], dtype)
    assert all(map(math.isfinite, advantages))
    assert advantages[0] > 0 > advantages[1] == advantages[2]


def test_a_rollout_with_no_trained_token_counts():
    mask_NT = torch.tensor([[True], [False], [True]])
    group = Group(reward_N=torch.tensor([0.0, 3.0, 0.0]), mask_NT=mask_NT)
    assert assign("dr_grpo", group).advantage_NT.tolist() == [[-1.0], [0.0], [-1.0]]
