"""What a group refuses, and what a method refuses of its options and signals."""

from typing import ClassVar

import pytest
import torch
from pydantic import Field

from megatron_credit.credit import CreditResult, Group, assign
from megatron_credit.credit.group import SIGNAL_SOURCES
from megatron_credit.credit.method import CreditMethod
from megatron_credit.credit.methods import METHODS

GOOD = {"reward_N": torch.tensor([1.0, 0.0]), "mask_NT": torch.ones(2, 4, dtype=torch.bool)}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reward_N": torch.tensor([1, 0])}, "reward_N has type torch.int64, expected float: one"),
        ({"reward_N": torch.tensor([True, False])}, "reward_N has type torch.bool, expected float"),
        ({"reward_N": [1.0, 0.0]}, "reward_N is a list, expected a tensor"),
        ({"reward_N": torch.zeros(2, 1)}, r"reward_N has shape \(2, 1\), expected \[N\]"),
        ({"mask_NT": torch.ones(3, 4).bool()}, r"mask_NT has shape \(3, 4\).*N = 2 as in reward_N"),
        ({"mask_NT": torch.ones(2, 4)}, "mask_NT has type torch.float32, expected bool"),
        ({"mask_NT": torch.ones(2).bool()}, r"mask_NT has shape \(2,\), expected \[N, T\]"),
        ({"policy_logprob_NT": torch.zeros(2, 5)}, "T = 4 as in mask_NT"),
        ({"attempt_id_NT": torch.zeros(2, 4)}, "attempt_id_NT has .* expected int: one of int64"),
        (
            {"answer_logprob_NMY": torch.zeros(2, 3, 5), "utility_Y": torch.zeros(4)},
            r"utility_Y has shape \(4,\), expected \[Y\] with Y = 5 as in answer_logprob_NMY",
        ),
        ({"answer_logprob_NMY": torch.zeros(2, 3)}, r"expected \[N, M \+ 1, Y\]"),
        ({"saliency_NT": torch.zeros(2, 4, device="meta")}, "saliency_NT is on meta"),
        ({"step": 0}, "step is 0; optimizer steps are counted from 1"),
        ({"step": 2.0}, "step is 2.0 of type float, expected int"),
        ({"seed": None}, "seed is None of type NoneType, expected int"),
        ({"kl_scale": "0.1"}, "kl_scale is '0.1' of type str, expected int or float"),
    ],
)
def test_bad_groups_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Group(**(GOOD | fields))


def test_every_tensor_of_a_group_says_where_it_comes_from():
    plain = {"step", "seed", "kl_scale"}
    assert set(SIGNAL_SOURCES) == set(Group.__dataclass_fields__) - plain
    assert all(SIGNAL_SOURCES.values())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("drgrpo", "unknown credit method 'drgrpo'; did you mean 'dr_grpo'"),
        ("DAPO", "unknown credit method 'DAPO'; did you mean 'dapo'"),
        ("zzz", "unknown credit method 'zzz'; valid: grpo, dr_grpo, rloo, dapo"),
    ],
)
def test_unknown_method_names_the_nearest(name, message):
    with pytest.raises(ValueError, match=message):
        assign(name, Group(**GOOD))


class Salient(CreditMethod):
    """A made-up method with an option and a signal."""

    name: ClassVar[str] = "salient"
    needs: ClassVar[tuple[str, ...]] = ("saliency_NT",)
    weight: float = Field(1.0, ge=0)

    def credit(self, group):
        # Infinite on trained and NaN on other tokens on purpose.
        advantage_NT = torch.full(group.mask_NT.shape, torch.inf).double()
        advantage_NT[~group.mask_NT] = torch.nan
        return CreditResult(advantage_NT=advantage_NT * self.weight, metrics={"salient/x": 2.0})


@pytest.fixture
def salient(monkeypatch):
    monkeypatch.setitem(METHODS, "salient", Salient)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wieght": 2.0}, "'salient': unknown option 'wieght'; did you mean 'weight'"),
        ({"weight": "2"}, "credit method 'salient': weight is '2'; it should be a valid number"),
        ({"weight": True}, "weight is True; it should be a valid number"),
        ({"weight": -1.0}, "weight is -1.0; it should be greater than or equal to 0"),
        ({"weight": float("nan")}, "weight is nan; it should be a finite number"),
    ],
)
def test_options_are_checked_in_plain_words(salient, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        assign("salient", Group(**GOOD, saliency_NT=torch.ones(2, 4)), **options)
    assert type(caught.value) is ValueError and "pydantic" not in str(caught.value)


def test_a_missing_signal_is_named_with_its_source(salient):
    message = "'salient' needs saliency_NT, .*comes from the activation backward pass"
    with pytest.raises(ValueError, match=message):
        assign("salient", Group(**GOOD))


def test_a_group_without_two_verdicts_does_not_ask_for_signals(salient):
    lonely = Group(reward_N=torch.tensor([1.0, torch.nan]), mask_NT=GOOD["mask_NT"])
    assert assign("salient", lonely).advantage_NT.eq(0).all()


def test_whatever_a_method_returns_is_masked_finite_and_float32(salient):
    mask_NT = torch.tensor([[True, False], [False, True]])
    group = Group(reward_N=GOOD["reward_N"], mask_NT=mask_NT, saliency_NT=torch.ones(2, 2))
    result = assign("salient", group, weight=2)
    largest = torch.finfo(torch.float32).max
    assert result.advantage_NT.tolist() == [[largest, 0.0], [0.0, largest]]
    assert result.metrics == {
        "salient/x": 2.0,
        "group/invalid_rewards": 0.0,
        "group/singleton": 0.0,
    }
