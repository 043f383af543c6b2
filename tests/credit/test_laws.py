"""What holds for every credit method, over the whole list, on groups that carry every signal."""

import math
import subprocess
import sys

import pytest
import torch
from credit.full_groups import (
    CREDITED_EQUAL_REWARDS,
    READING_ALL,
    changed,
    full_group,
    padded,
    reordered,
    spoiled,
    tensors,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_credit.credit import METHODS, Group, assign
from megatron_credit.credit.group import SIGNAL_SOURCES
from megatron_credit.credit.result import EXTRAS

every_method = pytest.mark.parametrize("name", METHODS)

reward_lists = st.lists(
    st.sampled_from([0.0, 1.0, 0.5, -1.0, 0.1, 1e30, 3.0000001, math.nan, math.inf]),
    min_size=0,
    max_size=9,
)
MIXED, WRONG, RIGHT = [1.0, 0.0, 1.0, 0.0, math.nan], [0.0] * 4, [1.0] * 4


@every_method
@settings(deadline=None, max_examples=60)
@given(rewards=reward_lists, num_tokens=st.integers(0, 6), seed=st.integers(0, 5))
def test_no_credit_outside_the_mask_and_always_finite(name, rewards, num_tokens, seed):
    group = full_group(rewards, num_tokens=num_tokens, seed=seed)
    result = assign(name, group)
    assert result.advantage_NT.dtype == torch.float32
    assert result.advantage_NT.shape == group.mask_NT.shape
    assert not result.advantage_NT.requires_grad
    assert result.advantage_NT[~group.mask_NT].eq(0).all()
    assert result.advantage_NT.isfinite().all()
    assert all(math.isfinite(value) for value in result.metrics.values())


@every_method
@settings(deadline=None, max_examples=60)
@given(rewards=reward_lists, seed=st.integers(0, 5))
def test_order_of_siblings_is_irrelevant(name, rewards, seed):
    group = full_group(rewards, seed=seed)
    order_N = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(
        assign(name, reordered(group, order_N)).advantage_NT,
        assign(name, group).advantage_NT[order_N],
    )


@every_method
@pytest.mark.parametrize("rewards", [MIXED, WRONG, RIGHT, [1.0]])
def test_extra_fields_are_those_declared_and_lie_within_the_mask(name, rewards):
    group = full_group(rewards)
    result = assign(name, spoiled(group))
    for field, dtype in EXTRAS.items():
        value_NT = vars(result)[field]
        assert (value_NT is not None) == (field in METHODS[name].gives)
        if value_NT is not None:
            assert value_NT.dtype == dtype and not value_NT[~group.mask_NT].any()


@every_method
@pytest.mark.parametrize("rewards", [MIXED, WRONG])
def test_padding_is_irrelevant(name, rewards):
    group = full_group(rewards)
    padded_NT = assign(name, padded(group, 4)).advantage_NT
    assert torch.equal(padded_NT[:, :6], assign(name, group).advantage_NT)
    assert padded_NT[:, 6:].eq(0).all()


@every_method
@pytest.mark.parametrize("rewards", [MIXED, WRONG])
def test_what_stands_outside_the_mask_is_never_read(name, rewards):
    group = full_group(rewards)
    spoiled_NT = assign(name, spoiled(group)).advantage_NT
    assert torch.equal(spoiled_NT, assign(name, group).advantage_NT)


@pytest.mark.parametrize("name", [n for n in METHODS if n not in CREDITED_EQUAL_REWARDS])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e30])
def test_equal_rewards_give_exactly_zero(name, reward):
    assert assign(name, full_group([reward] * 7)).advantage_NT.eq(0).all()


@every_method
@pytest.mark.parametrize("rewards", [[], [1.0], [math.nan, 1.0, math.inf], [math.nan] * 3])
def test_fewer_than_two_verdicts_give_zero_and_are_counted(name, rewards):
    result = assign(name, full_group(rewards))
    if METHODS[name].needs_siblings:
        assert result.advantage_NT.eq(0).all()
        assert not any(vars(result)[extra].any() for extra in METHODS[name].gives)
    assert result.metrics["group/singleton"] == 1.0
    assert result.metrics["group/invalid_rewards"] == sum(not math.isfinite(r) for r in rewards)


@every_method
@pytest.mark.parametrize("missing", [math.nan, math.inf, -math.inf])
def test_a_rollout_without_a_verdict_changes_nobody(name, missing):
    group = full_group([1.0, 0.0, 0.0, 1.0, 0.0, missing])
    first = {name: value[:5] for name, value in tensors(group).items() if name != "utility_Y"}
    without = assign(name, changed(group, first))
    result = assign(name, group)
    assert torch.equal(result.advantage_NT[:5], without.advantage_NT)
    assert any(vars(without)[field].any() for field in ("advantage_NT", *METHODS[name].gives))
    for field in METHODS[name].gives:
        assert torch.equal(vars(result)[field][:5], vars(without)[field])
    assert result.advantage_NT[5].eq(0).all()
    assert result.metrics["group/invalid_rewards"] == 1.0
    assert without.metrics["group/invalid_rewards"] == without.metrics["group/singleton"] == 0.0


@every_method
@pytest.mark.parametrize("rewards", [MIXED, WRONG, RIGHT])
def test_inputs_are_not_written_to(name, rewards):
    group = full_group(rewards)
    before = {name: value.clone() for name, value in tensors(group).items()}
    assign(name, group)
    for field, value in tensors(group).items():
        assert torch.equal(value.nan_to_num(-7), before[field].nan_to_num(-7)), field


@every_method
def test_config_round_trips_and_is_closed(name):
    method = METHODS[name].configure({})
    assert METHODS[name].model_validate_json(method.model_dump_json()) == method
    assert METHODS[name].name == name
    with pytest.raises(ValueError, match=f"credit method '{name}': unknown option 'bse'"):
        assign(name, full_group(MIXED), bse="grpo")
    assert method.model_config["frozen"] and method.model_config["extra"] == "forbid"


@every_method
def test_needs_are_the_signals_read(name):
    seen = set()

    class Watched(Group):
        def __getattribute__(self, attribute):
            seen.add(attribute)
            return super().__getattribute__(attribute)

    for rewards in (MIXED, WRONG, RIGHT):
        assign(name, changed(full_group(rewards), {}, Watched), **READING_ALL.get(name, {}))
    assert seen & set(SIGNAL_SOURCES) - {"reward_N", "mask_NT"} == set(METHODS[name].needs)


@every_method
@pytest.mark.parametrize("rewards", [MIXED, WRONG, RIGHT])
def test_only_required_signals_are_required(name, rewards):
    group = full_group(rewards)
    required = METHODS[name].configure({}).required(group)
    assert set(required) <= set(METHODS[name].needs)
    others = dict.fromkeys(set(tensors(group)) - {"reward_N", "mask_NT", *required})
    alone = assign(name, changed(group, others))
    assert torch.equal(alone.advantage_NT, assign(name, group).advantage_NT)
    for signal in required:
        with pytest.raises(ValueError, match=f"'{name}' needs {signal}"):
            assign(name, changed(group, {signal: None}))


def test_import_is_light():
    probe = (
        "import sys, megatron_credit.credit; "
        "heavy = ('triton', 'vllm', 'megatron', 'transformers', 'scipy', 'pandas', 'numba'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", probe], text=True).strip() == "[]"
