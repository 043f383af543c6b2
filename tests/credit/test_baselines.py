"""The baselines against literal numbers and an oracle that shares no code with them."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_credit.credit import Group, assign

BINARY = [1.0, 0.0, 0.0, 0.0]


def first_tokens(name, rewards, dtype=torch.float64):
    group = Group(
        reward_N=torch.tensor(rewards, dtype=dtype),
        mask_NT=torch.ones(len(rewards), 2, dtype=torch.bool),
    )
    advantage_NT = assign(name, group).advantage_NT
    assert torch.equal(advantage_NT[:, 0], advantage_NT[:, 1])
    return advantage_NT[:, 0].tolist()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [1.5, -0.5, -0.5, -0.5]),  # .75 / .5, -.25 / .5
        ("dapo", [1.5, -0.5, -0.5, -0.5]),
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25]),
        ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3]),
    ],
)
def test_one_of_four_right(name, expected):
    assert first_tokens(name, BINARY) == pytest.approx(expected, abs=4e-6)


def oracle(name, rewards):
    """Plain Python floats, statistics module."""
    valid = [reward for reward in rewards if math.isfinite(reward)]
    if len(valid) < 2 or len(set(valid)) == 1:
        return [0.0] * len(rewards)
    mean = math.fsum(valid) / len(valid)
    std = statistics.stdev(valid)
    rules = {
        "grpo": lambda r: (r - mean) / (std + 1e-6),
        "dapo": lambda r: (r - mean) / (std + 1e-6),
        "dr_grpo": lambda r: r - mean,
        "rloo": lambda r: r - (math.fsum(valid) - r) / (len(valid) - 1),
    }
    return [rules[name](r) if math.isfinite(r) else 0.0 for r in rewards]


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "rloo"])
@settings(deadline=None, max_examples=150)
@given(
    rewards=st.lists(
        st.one_of(
            st.sampled_from([0.0, 1.0, math.nan, -math.inf]),
            st.floats(-10, 10, width=32),
        ),
        min_size=1,
        max_size=16,
    )
)
def test_against_the_oracle(name, rewards):
    assert first_tokens(name, rewards) == pytest.approx(oracle(name, rewards), abs=1e-5, rel=1e-5)


def test_rewards_that_differ_by_one_ulp_are_not_equal():
    low, high = 1.0, math.nextafter(1.0, 2.0)
    advantages = first_tokens("dr_grpo", [low, high])
    assert advantages == pytest.approx([-(high - low) / 2, (high - low) / 2], rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_float_type_of_reward(dtype):
    assert first_tokens("grpo", BINARY, dtype) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=4e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reward_N": torch.tensor([1, 0])}, "reward_N has type torch.int64, expected a floating"),
        ({"mask_NT": torch.ones(3, 4).bool()}, r"mask_NT has shape \(3, 4\).*N = 2 as in reward_N"),
        ({"mask_NT": torch.ones(2, 4)}, "mask_NT has type torch.float32, expected bool"),
        ({"mask_NT": torch.ones(2).bool()}, r"mask_NT has shape \(2,\), expected \[N, T\]"),
        ({"policy_logprob_NT": torch.zeros(2, 5)}, "T = 4 as in mask_NT"),
        ({"reward_N": [1.0, 0.0]}, "reward_N is a list, expected a tensor"),
        ({"step": 0}, "counted from 1"),
        ({"attempt_id_NT": torch.zeros(2, 4)}, "attempt_id_NT .* expected an integer type"),
    ],
)
def test_bad_groups_are_refused(fields, message):
    good = {"reward_N": torch.tensor([1.0, 0.0]), "mask_NT": torch.ones(2, 4, dtype=torch.bool)}
    with pytest.raises(ValueError, match=message):
        Group(**(good | fields))


def test_unknown_method_names_the_nearest():
    group = Group(reward_N=torch.zeros(2), mask_NT=torch.ones(2, 1, dtype=torch.bool))
    with pytest.raises(ValueError, match="unknown credit method 'drgrpo'; did you mean 'dr_grpo'"):
        assign("drgrpo", group)
