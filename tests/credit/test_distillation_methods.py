"""OPD, and which tokens OPSD, SDPO and SRPO hand to the distillation loss."""

import math

import pytest
import torch
from credit.evidence_groups import NAN, assert_trained, finite, random_group, small_group, trained
from credit.full_groups import changed

from megatron_credit.credit import assign

TEACHER = [[-1.0, -2.0], [-0.5, -0.5], [-1.0, NAN], [-1.0, -1.0]]
POLICY = [[-1.5, -0.5], [-0.5, -0.25], [-1.0, -1.0], [-2.0, -2.0]]


def opd_group(rewards):
    num = len(rewards)
    return small_group(rewards, teacher_logprob_NT=TEACHER[:num], policy_logprob_NT=POLICY[:num])


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_opd_is_the_difference_whatever_the_reward(reward):
    result = assign("opd", opd_group([reward, 0.0, 0.0, NAN]))
    assert result.advantage_NT.tolist() == [[0.5, -1.5], [0.0, -0.25], [0.0, 0.0], [0.0, 0.0]]
    assert result.metrics["credit/no_evidence_rollouts"] == 1


@pytest.mark.parametrize("rewards", [[0.0], [1.0, NAN]])
def test_opd_needs_no_siblings(rewards):
    result = assign("opd", opd_group(rewards))
    assert result.advantage_NT[0].tolist() == [0.5, -1.5]
    assert result.metrics["group/singleton"] == 1 and result.advantage_NT[1:].eq(0).all()


@pytest.mark.parametrize("seed", range(60))
def test_opd_against_the_oracle(seed):
    group = random_group(seed)
    expected = [
        [t - p for t, p in zip(teacher, policy, strict=True)]
        if finite(teacher, policy, [reward])
        else [0.0] * len(teacher)
        for reward, teacher, policy in zip(
            group.reward_N.tolist(),
            trained(group, "teacher_logprob_NT"),
            trained(group, "policy_logprob_NT"),
            strict=True,
        )
    ]
    assert_trained(assign("opd", group).advantage_NT, group.mask_NT, expected)


@pytest.mark.parametrize("missing", ["teacher_logprob_NT", "policy_logprob_NT"])
def test_opd_names_the_missing_signal(missing):
    with pytest.raises(ValueError, match=f"'opd' needs {missing}"):
        assign("opd", changed(opd_group([0.0]), {missing: None}))


# The second rollout has no evidence, the last one no verdict.
FOUR = small_group([1.0, 0.0, 0.0, 0.0, NAN], positive_logprob_NT=[[-1.0], [NAN], *[[-1.0]] * 3])


@pytest.mark.parametrize("name", ["opsd", "sdpo"])
def test_distillation_alone_takes_every_row_with_evidence(name):
    result = assign(name, FOUR)
    assert result.advantage_NT.eq(0).all()
    assert result.distillation_mask_NT[:, 0].tolist() == [True, False, True, True, True]
    assert result.metrics["credit/distilled_tokens"] == 4 / 5


def test_srpo_reinforces_above_the_mean_and_distils_the_rest():
    result = assign("srpo", FOUR)
    # A = .75 / .5 of GRPO.
    assert result.advantage_NT[:, 0].tolist() == pytest.approx([1.5, 0, 0, 0, 0], abs=4e-6)
    assert result.distillation_mask_NT[:, 0].tolist() == [False, False, True, True, True]


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_srpo_distils_equal_rewards(reward):
    group = small_group([reward] * 2, positive_logprob_NT=[[-1.0], [-1.0]])
    result = assign("srpo", group)
    assert result.advantage_NT.eq(0).all() and result.distillation_mask_NT.all()


@pytest.mark.parametrize("name", ["opsd", "sdpo", "srpo"])
@pytest.mark.parametrize("seed", range(20))
def test_a_token_is_reinforced_or_distilled_never_both(name, seed):
    group = random_group(seed)
    result = assign(name, group)
    grpo_NT = assign("grpo", group).advantage_NT
    evidence_N = [finite(values) for values in trained(group, "positive_logprob_NT")]
    open_NT = group.mask_NT & torch.tensor(evidence_N)[:, None]
    if name == "srpo":
        assert torch.equal(result.advantage_NT, grpo_NT.clamp(min=0))
        open_NT = open_NT & (grpo_NT <= 0)
    if result.metrics["group/singleton"]:
        open_NT = torch.zeros_like(open_NT)
    assert torch.equal(result.distillation_mask_NT, open_NT)
    assert not (result.advantage_NT.ne(0) & result.distillation_mask_NT).any()


@pytest.mark.parametrize("name", ["opd", "opsd", "sdpo", "srpo"])
def test_they_have_no_options(name):
    with pytest.raises(ValueError, match=f"'{name}': unknown option 'beta'; it has none"):
        assign(name, FOUR, beta=0.5)


@pytest.mark.parametrize("name", ["opsd", "sdpo", "srpo"])
def test_distillation_names_the_missing_signal(name):
    message = f"'{name}' needs positive_logprob_NT.*the teacher pass with good evidence"
    with pytest.raises(ValueError, match=message):
        assign(name, changed(FOUR, {"positive_logprob_NT": None}))


def test_infinite_log_probs_are_no_evidence():
    group = small_group([1.0, 0.0], positive_logprob_NT=[[-math.inf], [-1.0]])
    assert assign("sdpo", group).distillation_mask_NT[:, 0].tolist() == [False, True]
