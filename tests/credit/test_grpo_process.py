"""Process GRPO: standardised scores, summed over the steps that follow."""

import math
import random

import pytest
import torch
from credit.full_groups import changed
from credit.step_groups import (
    assert_steps,
    exact_advantages,
    random_scores,
    standardise,
    step_group,
)

from megatron_credit.credit import assign

SCORES = [[0.5, 1.0], [0.0]]
NEARLY = [[0.1 + 0.2], [0.3]]  # differ by rounding


@pytest.mark.parametrize("rewards", [[0.0, 0.0], [1.0, 1.0], [1.0, 0.0]])
def test_two_steps_and_one_whatever_the_rewards(rewards):
    # Mean 1/2, std sqrt(1/6): standardised 0, sqrt 1.5, -sqrt 1.5.
    root = math.sqrt(1.5)
    group = step_group(SCORES, rewards=rewards)
    assert_steps(exact_advantages("grpo_process", group), [[root, root], [-root]])
    assert_steps(assign("grpo_process", group).advantage_NT[:, ::2], [[root, root], [-root]], 1e-6)


def test_against_the_oracle():
    rng = random.Random(0)
    for _ in range(60):
        scores = random_scores(rng)
        expected = [[sum(row[j:]) for j in range(len(row))] for row in standardise(scores)]
        group = step_group([*scores, [9.0] * 4], rewards=[0.0] * len(scores) + [math.inf])
        assert_steps(exact_advantages("grpo_process", group), expected)


def test_the_first_steps_sum_to_zero_over_the_group():
    group = step_group([[0.1, 0.9, 0.4], [0.3], [0.8, 0.7]])
    assert exact_advantages("grpo_process", group)[:, 0].sum() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("scores", [[[0.3, 0.3], [0.3]], [[0.7], []], [[], []], NEARLY])
def test_equal_single_or_no_steps_give_exactly_zero(scores):
    result = assign("grpo_process", step_group(scores))
    assert result.advantage_NT.eq(0).all()
    assert result.metrics["credit/prm_failed"] == 0


@pytest.mark.parametrize("failure", [math.nan, math.inf])
def test_a_failed_prm_gives_zero_and_is_counted(failure):
    result = assign("grpo_process", step_group([[0.5, failure], [0.0]]))
    assert result.advantage_NT.eq(0).all()
    assert result.metrics["credit/prm_failed"] == 1


def test_trained_tokens_of_no_step_get_zero():
    group = step_group(SCORES)
    mask_NT = torch.ones_like(group.mask_NT)
    id_NT = group.step_id_NT.where(group.mask_NT, -1)
    advantage_NT = assign(
        "grpo_process", changed(group, {"mask_NT": mask_NT, "step_id_NT": id_NT})
    ).advantage_NT
    assert torch.equal(advantage_NT, assign("grpo_process", group).advantage_NT)


def test_it_has_no_options():
    with pytest.raises(ValueError, match="unknown option 'discount'; it has none"):
        assign("grpo_process", step_group(SCORES), discount=1.0)


def test_missing_scores_are_named_with_their_source():
    group = changed(step_group(SCORES), {"step_score_NS": None})
    with pytest.raises(ValueError, match=r"'grpo_process' needs step_score_NS.*process reward"):
        assign("grpo_process", group)
