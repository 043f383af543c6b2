"""Gradients of the loss: finite differences, closed form, and what must not reach them."""

import itertools
import math

import pytest
import torch

from megatron_credit.objective.config import ObjectiveConfig
from megatron_credit.objective.kl import kl_estimate
from megatron_credit.objective.loss import TokenInputs, policy_loss

NUM_TOKENS = 40
CONFIGS = [
    ObjectiveConfig(importance=importance, kl_coef=kl_coef, kl_estimator=kind, clip_high=0.28)
    for importance, (kl_coef, kind) in itertools.product(
        ("none", "truncate", "mask"), ((0.0, "k3"), (0.3, "k1"), (0.3, "k2"), (0.3, "k3"))
    )
]
every_config = pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda c: f"{c.importance}-{c.kl_estimator}-{c.kl_coef}"
)


def random_inputs(seed=0, dtype=torch.float64, outside=0.0):
    """Ratios on both sides of both clips; about a third of the tokens is not trained."""
    rng = torch.Generator().manual_seed(seed)

    def normal(scale):
        return scale * torch.randn(NUM_TOKENS, generator=rng, dtype=torch.float64)

    policy_T = -2 + normal(1.0)
    values = {
        "policy_logprob_T": policy_T,
        "old_logprob_T": policy_T + normal(0.4),
        "rollout_logprob_T": policy_T + normal(0.6),
        "advantage_T": normal(1.0),
        "weight_T": normal(1.0).abs(),
        "reference_logprob_T": policy_T + normal(0.5),
        "entropy_T": normal(1.0).abs(),
    }
    mask_T = torch.rand(NUM_TOKENS, generator=rng) < 0.7
    fields = {name: torch.where(mask_T, v, outside).to(dtype) for name, v in values.items()}
    fields["policy_logprob_T"].requires_grad_()
    return TokenInputs(**fields, mask_T=mask_T)


def gradient_of(inputs, config):
    result = policy_loss(inputs, config)
    return torch.autograd.grad(result.loss, inputs.policy_logprob_T)[0]


@every_config
def test_gradient_is_that_of_finite_differences(config):
    inputs = random_inputs()

    def loss(policy_T):
        return policy_loss(
            TokenInputs(**(vars(inputs) | {"policy_logprob_T": policy_T})), config
        ).loss

    assert torch.autograd.gradcheck(loss, inputs.policy_logprob_T, eps=1e-7, atol=1e-6)


@every_config
def test_gradient_has_the_closed_form(config):
    inputs = random_inputs(seed=1)
    policy_T, ratios = inputs.policy_logprob_T.detach(), []
    expected = []
    for t in range(NUM_TOKENS):
        advantage = inputs.advantage_T[t].item()
        ratio = math.exp(policy_T[t] - inputs.old_logprob_T[t])
        engine = math.exp(inputs.old_logprob_T[t] - inputs.rollout_logprob_T[t])
        factor = {
            "none": 1.0,
            "truncate": min(engine, 2.0),
            "mask": float(0.5 <= engine <= 2.0),
        }[config.importance]
        clipped = ratio > 1.28 if advantage > 0 else ratio < 0.8
        x = (policy_T[t] - inputs.reference_logprob_T[t]).item()
        kl = {"k1": 1.0, "k2": x, "k3": 1 - math.exp(-x)}[config.kl_estimator]
        surrogate = 0.0 if clipped else -advantage * ratio
        token = inputs.weight_T[t].item() * (factor * surrogate + config.kl_coef * kl)
        expected.append(token if inputs.mask_T[t] else 0.0)
        ratios.append(clipped)
    assert any(ratios) and not all(ratios)
    assert gradient_of(inputs, config).tolist() == pytest.approx(expected, abs=1e-12)


@every_config
def test_nan_outside_the_mask_reaches_nothing(config):
    clean, dirty = random_inputs(seed=2), random_inputs(seed=2, outside=math.nan)
    expected, result = policy_loss(clean, config), policy_loss(dirty, config)
    assert dirty.policy_logprob_T.isnan().any()
    assert torch.equal(result.loss, expected.loss)
    assert result.sums == expected.sums and result.maxima == expected.maxima
    gradient_T = gradient_of(dirty, config)
    assert torch.equal(gradient_T, gradient_of(clean, config))
    assert gradient_T[~dirty.mask_T].eq(0).all()


@pytest.mark.parametrize("importance", ["none", "truncate", "mask"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_policy_ratio_is_one_and_gradient_minus_the_advantage_exactly(importance, dtype):
    inputs = random_inputs(dtype=dtype)
    own_T = inputs.policy_logprob_T.detach()
    fields = {
        "old_logprob_T": own_T,
        "rollout_logprob_T": own_T,
        "weight_T": torch.ones_like(own_T),
    }
    inputs = TokenInputs(**(vars(inputs) | fields))
    config = ObjectiveConfig(importance=importance)
    expected_T = torch.where(inputs.mask_T, -inputs.advantage_T, 0.0)
    assert torch.equal(gradient_of(inputs, config), expected_T)
    sums = policy_loss(inputs, config).sums
    assert sums["ratio"] == sums["tokens"] == inputs.mask_T.sum()
    assert sums["clip_low"] == sums["clip_high"] == sums["importance_truncated"] == 0


def test_the_old_policy_gets_no_gradient_even_if_it_is_the_same_tensor():
    inputs = random_inputs()
    inputs = TokenInputs(**(vars(inputs) | {"old_logprob_T": inputs.policy_logprob_T}))
    config = ObjectiveConfig(importance="none")
    expected_T = torch.where(inputs.mask_T, -inputs.advantage_T * inputs.weight_T, 0.0)
    torch.testing.assert_close(gradient_of(inputs, config), expected_T)


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
@pytest.mark.parametrize("distance", [-1e4, -100.0, -20.5, 20.5, 100.0, 1e4])
def test_beyond_the_bound_of_the_exponent_the_gradient_is_zero(advantage, distance):
    one_T = torch.ones(1)
    inputs = TokenInputs(
        policy_logprob_T=torch.tensor([distance], requires_grad=True),
        old_logprob_T=0 * one_T,
        rollout_logprob_T=0 * one_T,
        advantage_T=advantage * one_T,
        weight_T=one_T,
        mask_T=one_T.bool(),
        reference_logprob_T=None,
        entropy_T=None,
    )
    result = policy_loss(inputs, ObjectiveConfig())
    assert result.loss.isfinite()
    assert gradient_of(inputs, ObjectiveConfig()).item() == 0


def test_an_engine_that_reports_minus_infinity_stays_finite():
    fields = vars(random_inputs())
    inputs = TokenInputs(
        **(fields | {"rollout_logprob_T": torch.full((NUM_TOKENS,), -math.inf).double()})
    )
    assert policy_loss(inputs, ObjectiveConfig()).loss.isfinite()
    assert gradient_of(inputs, ObjectiveConfig()).isfinite().all()


@pytest.mark.parametrize("gap", [1e-4, -1e-4, 3e-6])
def test_k3_of_a_small_gap_is_not_lost_in_rounding(gap):
    # exp(-x) - 1 + x in float32 is off by 6e-8 here, and negative as often as not.
    policy_T = torch.tensor([gap], dtype=torch.float32)
    value = kl_estimate(policy_T, torch.zeros(1), "k3").item()
    assert value >= 0
    assert value == pytest.approx(gap**2 / 2, rel=2e-2, abs=1e-12)


@pytest.mark.parametrize("name", ["old_logprob_T", "mask_T", "reference_logprob_T"])
def test_shapes_must_agree(name):
    fields = vars(random_inputs())
    with pytest.raises(ValueError, match=rf"{name} has shape \(39,\), expected \(40,\)"):
        TokenInputs(**(fields | {name: fields[name][:39]}))


def test_the_mask_is_boolean():
    fields = vars(random_inputs())
    with pytest.raises(ValueError, match=r"mask_T has type torch.float64, expected torch.bool"):
        TokenInputs(**(fields | {"mask_T": fields["mask_T"].double()}))
