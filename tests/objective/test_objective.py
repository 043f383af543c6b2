"""The objective: literal values, closed-form gradients, and sums that do not depend on the cut."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_credit.objective.config import ObjectiveConfig
from megatron_credit.objective.importance import importance_correction
from megatron_credit.objective.kl import kl_estimate
from megatron_credit.objective.loss import TokenInputs, policy_loss
from megatron_credit.objective.normalise import normaliser
from megatron_credit.objective.overlong import overlong_penalty
from megatron_credit.objective.surrogate import clip_hits

NAN = math.nan
UNCORRECTED = ObjectiveConfig(importance="none", clip_low=0.2, clip_high=0.3)


def tokens(policy, old, advantage, mask=None, **others):
    mask = [True] * len(policy) if mask is None else mask
    fields = {
        "policy_logprob_T": torch.tensor(policy, dtype=torch.float64, requires_grad=True),
        "old_logprob_T": torch.tensor(old, dtype=torch.float64),
        "rollout_logprob_T": torch.tensor(old, dtype=torch.float64),
        "advantage_T": torch.tensor(advantage, dtype=torch.float64),
        "weight_T": torch.ones(len(policy), dtype=torch.float64),
        "mask_T": torch.tensor(mask, dtype=torch.bool),
        "reference_logprob_T": None,
        "entropy_T": None,
    }
    return TokenInputs(**(fields | others))


def loss_and_gradient(inputs, config):
    result = policy_loss(inputs, config)
    (gradient_T,) = torch.autograd.grad(result.loss, inputs.policy_logprob_T)
    return result, gradient_T.tolist()


def test_surrogate_values_and_gradients():
    # ratios 1, 2, 2, 1/2, 1/2 with advantages 3, 1, -1, 1, -1
    step = math.log(2)
    inputs = tokens([0, step, step, -step, -step], [0.0] * 5, [3, 1, -1, 1, -1])
    result, gradient = loss_and_gradient(inputs, UNCORRECTED)
    assert result.loss.item() == pytest.approx(-3 - 1.3 + 2 - 0.5 + 0.8)
    assert gradient == pytest.approx([-3, 0, 2, -0.5, 0])
    assert result.sums["clip_high"] == 1 and result.sums["clip_low"] == 1
    assert result.sums["ratio"] == pytest.approx(1 + 2 + 2 + 0.5 + 0.5)


def test_on_policy_gradient_is_minus_the_advantage():
    inputs = tokens([-1.0, -2.0, -3.0], [-1.0, -2.0, -3.0], [0.5, -2.0, 0.0])
    result, gradient = loss_and_gradient(inputs, ObjectiveConfig())
    assert gradient == [-0.5, 2.0, 0.0]
    assert result.loss.item() == 1.5


def test_what_stands_outside_the_mask_is_never_read():
    mask = [True, False, True]
    clean = tokens([-1.0, 0.0, -2.0], [-1.1, 0.0, -2.2], [1.0, 0.0, -1.0], mask)
    dirty = tokens([-1.0, NAN, -2.0], [-1.1, NAN, -2.2], [1.0, NAN, -1.0], mask)
    dirty.weight_T[1] = NAN
    config = ObjectiveConfig(kl_coef=0.1)
    for inputs in (clean, dirty):
        object.__setattr__(inputs, "reference_logprob_T", inputs.old_logprob_T - 0.3)
        object.__setattr__(inputs, "entropy_T", inputs.old_logprob_T.abs())
    expected, expected_gradient = loss_and_gradient(clean, config)
    result, gradient = loss_and_gradient(dirty, config)
    assert result.loss == expected.loss and gradient == expected_gradient
    assert result.sums == expected.sums and result.maxima == expected.maxima


def test_all_masked_gives_zero_and_zero_gradient():
    result, gradient = loss_and_gradient(
        tokens([NAN, NAN], [NAN, NAN], [NAN, NAN], [False, False]), ObjectiveConfig()
    )
    assert result.loss == 0 and gradient == [0, 0]
    assert all(value == 0 for value in {**result.sums, **result.maxima}.values())


def test_no_tokens_at_all():
    result, gradient = loss_and_gradient(tokens([], [], [], []), ObjectiveConfig())
    assert result.loss == 0 and gradient == []
    assert result.maxima["mismatch_abs_max"] == 0


@pytest.mark.parametrize("distance", [-1000.0, 1000.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_far_ratios_stay_finite(distance, advantage):
    result, gradient = loss_and_gradient(tokens([distance], [0.0], [advantage]), UNCORRECTED)
    assert result.loss.isfinite() and math.isfinite(gradient[0])


def test_truncated_importance():
    # engine log-probs below the trainer's by log 4, log 1.5 and above by log 4
    gap = [math.log(4), math.log(1.5), -math.log(4)]
    inputs = tokens([0.0] * 3, [0.0] * 3, [1.0] * 3)
    object.__setattr__(inputs, "rollout_logprob_T", -torch.tensor(gap, dtype=torch.float64))
    result, gradient = loss_and_gradient(inputs, ObjectiveConfig(importance_cap=2.0))
    assert gradient == pytest.approx([-2.0, -1.5, -0.25])
    assert result.sums["importance_truncated"] == 1
    result, gradient = loss_and_gradient(
        inputs, ObjectiveConfig(importance="mask", importance_cap=2.0)
    )
    assert gradient == pytest.approx([0.0, -1.0, 0.0])
    assert result.sums["importance_truncated"] == 2
    assert result.sums["mismatch_abs"] == pytest.approx(2 * math.log(4) + math.log(1.5))
    assert result.maxima["mismatch_abs_max"] == pytest.approx(math.log(4))


def test_no_gradient_through_the_correction():
    old_T = torch.zeros(2, requires_grad=True)
    correction = importance_correction(
        old_T, torch.ones(2), torch.ones(2).bool(), kind="truncate", cap=2.0
    )
    assert not correction.weight_T.requires_grad


@pytest.mark.parametrize(
    ("kind", "expected"), [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 0.5)]
)
def test_kl_estimators(kind, expected):
    policy_T, reference_T = torch.tensor([-1.0]), torch.tensor([-1.5])
    assert kl_estimate(policy_T, reference_T, kind).item() == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("distance", [-100.0, -20.5, 0.0, 100.0])
def test_kl_gradient_is_finite_and_never_pushes_away(kind, distance):
    policy_T = torch.tensor([distance], requires_grad=True)
    value_T = kl_estimate(policy_T, torch.zeros(1), kind)
    (gradient_T,) = torch.autograd.grad(value_T.sum(), policy_T)
    assert value_T.isfinite().all() and gradient_T.isfinite().all()
    if kind != "k1":
        assert gradient_T.item() * distance >= 0


def test_kl_term_needs_a_reference():
    with pytest.raises(ValueError, match=r"kl_coef=0.1 needs the reference policy's log-probs"):
        policy_loss(tokens([0.0], [0.0], [1.0]), ObjectiveConfig(kl_coef=0.1))


def test_normalisers():
    lengths = [4, 0, 2]
    mean = normaliser(lengths, ObjectiveConfig())
    assert (mean.weight_N, mean.count) == ([1, 1, 1], 6)
    sequence = normaliser(lengths, ObjectiveConfig(normalisation="sequence_mean"))
    assert (sequence.weight_N, sequence.count) == ([0.25, 1, 0.5], 2)
    constant = normaliser(lengths, ObjectiveConfig(normalisation="constant", constant_length=10))
    assert (constant.weight_N, constant.count) == ([1, 1, 1], 30)
    assert normaliser([], ObjectiveConfig()).count == 1


def test_two_means_have_weights_over_one_count():
    norm = normaliser([4, 0, 2], ObjectiveConfig(), [1, 0, 1])
    assert (norm.weight_N, norm.selected_weight, norm.count) == ([1.5, 1.5, 1.5], 3.0, 6)
    none = normaliser([4, 2], ObjectiveConfig(), [0, 0])
    assert (none.weight_N, none.count) == ([1, 1], 6)


def test_constant_needs_a_length():
    with pytest.raises(ValueError, match="set constant_length"):
        ObjectiveConfig(normalisation="constant")


@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean", "constant"])
@settings(deadline=None, max_examples=25)
@given(cut=st.lists(st.integers(0, 3), min_size=6, max_size=6), seed=st.integers(0, 1000))
def test_the_cut_into_micro_batches_changes_nothing(kind, cut, seed):
    config = ObjectiveConfig(normalisation=kind, constant_length=8, importance="truncate")
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 8, (6,), generator=generator).tolist()
    norm = normaliser(lengths, config)
    owner_T = torch.tensor([i for i, length in enumerate(lengths) for _ in range(length)]).long()
    draw = {
        name: torch.randn(len(owner_T), generator=generator, dtype=torch.float64)
        for name in ("policy", "old", "rollout", "advantage")
    }
    weight_T = torch.tensor(norm.weight_N, dtype=torch.float64)[owner_T]

    def total(parts):
        policy_T = draw["policy"].clone().requires_grad_()
        loss = sum(
            policy_loss(
                TokenInputs(
                    policy_logprob_T=policy_T[part_T],
                    old_logprob_T=draw["old"][part_T],
                    rollout_logprob_T=draw["rollout"][part_T],
                    advantage_T=draw["advantage"][part_T],
                    weight_T=weight_T[part_T],
                    mask_T=torch.ones(int(part_T.sum()), dtype=torch.bool),
                    reference_logprob_T=None,
                    entropy_T=None,
                ),
                config,
            ).loss
            for part_T in parts
        )
        (gradient_T,) = torch.autograd.grad(loss / norm.count, policy_T)
        return loss.item(), gradient_T

    place_T = torch.tensor(cut)[owner_T]
    whole, whole_gradient_T = total([torch.ones(len(owner_T), dtype=torch.bool)])
    parts, parts_gradient_T = total([place_T == k for k in range(4)])
    assert parts == pytest.approx(whole, abs=1e-12)
    torch.testing.assert_close(parts_gradient_T, whole_gradient_T, atol=1e-14, rtol=0)


def test_sequence_mean_is_the_mean_of_means():
    config = ObjectiveConfig(normalisation="sequence_mean", importance="none")
    norm = normaliser([2, 1], config)
    inputs = tokens([0.0] * 3, [0.0] * 3, [1.0, 3.0, 10.0])
    weights = torch.tensor([norm.weight_N[0]] * 2 + [norm.weight_N[1]], dtype=torch.float64)
    object.__setattr__(inputs, "weight_T", weights)
    assert (policy_loss(inputs, config).loss / norm.count).item() == -(2 + 10) / 2


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_metric_keys_depend_on_the_configuration_alone(kl_coef):
    config = ObjectiveConfig(kl_coef=kl_coef)
    reference = {"reference_logprob_T": torch.zeros(1).double()}
    full = policy_loss(tokens([0.0], [0.0], [1.0], entropy_T=torch.ones(1), **reference), config)
    bare = policy_loss(tokens([0.0], [0.0], [1.0], [False], **reference), config)
    names = {"ratio", "clip_low", "clip_high", "importance_truncated", "tokens", "entropy"}
    names |= {"mismatch_abs", "mismatch_k3"} | ({"kl_reference"} if kl_coef else set())
    assert set(full.sums) == set(bare.sums) == names
    assert set(full.maxima) == set(bare.maxima) == {"mismatch_abs_max"}
    assert full.sums["entropy"] == 1 and bare.sums["entropy"] == 0


@pytest.mark.parametrize(
    ("length", "expected"), [(10, 0.0), (80, 0.0), (90, -0.5), (100, -1.0), (150, -1.0)]
)
def test_overlong_penalty(length, expected):
    assert overlong_penalty(length, max_length=100, buffer=20) == expected


def test_overlong_penalty_refuses_a_bad_buffer():
    with pytest.raises(ValueError, match="buffer=0"):
        overlong_penalty(5, max_length=100, buffer=0)


def test_clip_hits_are_where_the_gradient_was_removed():
    ratio_T = torch.tensor([0.5, 0.5, 0.8, 1.0, 1.3, 2.0, 2.0], dtype=torch.float64)
    advantage_T = torch.tensor([-1.0, 1.0, -1.0, 1.0, 1.0, 1.0, -1.0])
    low_T, high_T = clip_hits(ratio_T, advantage_T, clip_low=0.2, clip_high=0.3)
    assert low_T.tolist() == [True, False, False, False, False, False, False]
    assert high_T.tolist() == [False, False, False, False, False, True, False]
