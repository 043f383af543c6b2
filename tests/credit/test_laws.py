"""What holds for every credit method, over the whole list."""

import math
import subprocess
import sys
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_credit.credit import METHODS, Group, assign

every_method = pytest.mark.parametrize("name", METHODS)

reward_lists = st.lists(
    st.sampled_from([0.0, 1.0, 0.5, -1.0, 0.1, 1e30, 3.0000001, math.nan, math.inf]),
    min_size=0,
    max_size=9,
)


def group_of(rewards, num_tokens=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mask_NT = torch.rand(len(rewards), num_tokens, generator=generator) < 0.7
    return Group(reward_N=torch.tensor(rewards, dtype=torch.float64), mask_NT=mask_NT)


@every_method
@settings(deadline=None, max_examples=60)
@given(rewards=reward_lists)
def test_no_credit_outside_the_mask_and_always_finite(name, rewards):
    group = group_of(rewards)
    result = assign(name, group)
    assert result.advantage_NT.dtype == torch.float32
    assert result.advantage_NT.shape == group.mask_NT.shape
    assert result.advantage_NT[~group.mask_NT].eq(0).all()
    assert result.advantage_NT.isfinite().all()


@every_method
@settings(deadline=None, max_examples=60)
@given(rewards=reward_lists, seed=st.integers(0, 5))
def test_order_of_siblings_is_irrelevant(name, rewards, seed):
    group = group_of(rewards)
    order_N = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(seed))
    shuffled = Group(reward_N=group.reward_N[order_N], mask_NT=group.mask_NT[order_N])
    torch.testing.assert_close(
        assign(name, shuffled).advantage_NT, assign(name, group).advantage_NT[order_N]
    )


@every_method
def test_padding_is_irrelevant(name):
    group = group_of([1.0, 0.0, 1.0])
    wider = replace(group, mask_NT=torch.nn.functional.pad(group.mask_NT, (0, 4)))
    padded_NT = assign(name, wider).advantage_NT
    assert torch.equal(padded_NT[:, :5], assign(name, group).advantage_NT)
    assert padded_NT[:, 5:].eq(0).all()


@every_method
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e30])
def test_equal_rewards_give_exactly_zero(name, reward):
    assert assign(name, group_of([reward] * 7)).advantage_NT.eq(0).all()


@every_method
@pytest.mark.parametrize("rewards", [[], [1.0], [math.nan, 1.0, math.inf], [math.nan] * 3])
def test_fewer_than_two_verdicts_give_zero_and_are_counted(name, rewards):
    result = assign(name, group_of(rewards))
    assert result.advantage_NT.eq(0).all()
    assert result.metrics["group/singleton"] == 1.0
    assert result.metrics["group/invalid_rewards"] == sum(not math.isfinite(r) for r in rewards)


@every_method
def test_a_rollout_without_a_verdict_changes_nobody(name):
    rewards = [1.0, 0.0, 0.0, 1.0, 0.0]
    group = group_of(rewards)
    result = assign(name, group)
    spoiled = group_of([*rewards, math.nan])
    spoiled = replace(spoiled, mask_NT=torch.cat([group.mask_NT, torch.ones(1, 5).bool()]))
    with_invalid = assign(name, spoiled)
    assert torch.equal(with_invalid.advantage_NT[:5], result.advantage_NT)
    assert with_invalid.advantage_NT[5].eq(0).all()
    assert with_invalid.metrics["group/invalid_rewards"] == 1.0
    assert result.metrics["group/singleton"] == 0.0


@every_method
def test_inputs_are_not_written_to(name):
    group = group_of([1.0, math.nan, 0.0])
    before = [group.reward_N.clone(), group.mask_NT.clone()]
    assign(name, group)
    assert torch.equal(group.reward_N.nan_to_num(-7), before[0].nan_to_num(-7))
    assert torch.equal(group.mask_NT, before[1])


@every_method
def test_config_round_trips_and_is_closed(name):
    method = METHODS[name].configure({})
    assert METHODS[name].model_validate_json(method.model_dump_json()) == method
    assert METHODS[name].name == name
    with pytest.raises(ValueError, match=f"credit method '{name}': unknown option 'bse'"):
        assign(name, group_of([1.0, 0.0]), bse="grpo")


@every_method
def test_needed_signals_are_group_fields_and_missing_ones_are_named(name):
    method = METHODS[name]
    assert set(method.needs) <= {field.name for field in fields(Group)}
    for signal in method.configure({}).required(group_of([1.0, 0.0])):
        with pytest.raises(ValueError, match=signal):
            assign(name, group_of([1.0, 0.0]))


def test_import_is_light():
    probe = (
        "import sys, megatron_credit.credit; "
        "heavy = ('triton', 'vllm', 'megatron', 'transformers'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", probe], text=True).strip() == "[]"
