"""The PRM's score of a rollout in place of the verifier's: literal numbers and a slow oracle."""

import math
import random

import pytest
import torch
from credit.full_groups import changed
from credit.step_groups import random_scores, step_group

from megatron_credit.credit import METHODS, Group, assign

SCORES = [[0.5, 1.0], [0.25, 0.5], [0.75, 0.25]]
RULES = {
    "mean": lambda row: sum(row) / len(row),
    "min": min,
    "last": lambda row: row[-1],
    "product": math.prod,
}


def rollout_advantages(group, **options):
    """[N] float64: the one advantage of each rollout's trained tokens, 0 where it has none."""
    advantage_NT = METHODS["prm_outcome"].configure(options).credit(group).advantage_NT
    for row_T, mask_T in zip(advantage_NT, group.mask_NT, strict=True):
        assert len(row_T[mask_T].unique()) <= 1
        assert row_T[~mask_T].eq(0).all()
    return advantage_NT.sum(dim=1) / group.mask_NT.sum(dim=1).clamp(min=1)


@pytest.mark.parametrize(
    ("aggregate", "rewards"),
    [
        ("mean", [0.75, 0.375, 0.5]),
        ("min", [0.5, 0.25, 0.25]),
        ("last", [1.0, 0.5, 0.25]),
        ("product", [0.5, 0.125, 0.1875]),
    ],
)
@pytest.mark.parametrize("base", ["grpo", "dr_grpo", "rloo"])
def test_the_baseline_on_the_aggregate(aggregate, rewards, base):
    # The verifier's own rewards are not read.
    group = step_group(SCORES, rewards=[0.0, 1.0, 0.0])
    advantage_NT = assign("prm_outcome", group, aggregate=aggregate, base=base).advantage_NT
    plain = Group(reward_N=torch.tensor(rewards).double(), mask_NT=group.mask_NT)
    assert torch.equal(advantage_NT, assign(base, plain).advantage_NT)
    assert advantage_NT.ne(0).any()


def test_defaults_are_the_mean_and_grpo():
    # Rewards .75, 0: deviations +-.375, std .375 sqrt 2.
    advantage_N = rollout_advantages(step_group([[0.5, 1.0], [0.0]]))
    assert advantage_N.tolist() == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)], abs=3e-6)


@pytest.mark.parametrize("aggregate", RULES)
def test_against_the_oracle(aggregate):
    rng = random.Random(aggregate)
    for _ in range(40):
        scores = [*random_scores(rng), [0.5, math.nan], [9.0] * 4]
        verdicts = [0.0] * (len(scores) - 1) + [math.nan]
        # No steps, a step without a score, no verdict: all three are left out.
        rewards = {i: RULES[aggregate](row) for i, row in enumerate(scores[:-2]) if row}
        expected = [0.0] * len(scores)
        if len(rewards) > 1:
            mean = sum(rewards.values()) / len(rewards)
            for i, reward in rewards.items():
                expected[i] = reward - mean
        group = step_group(scores, rewards=verdicts)
        advantage_N = rollout_advantages(group, aggregate=aggregate, base="dr_grpo")
        assert advantage_N.tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("aggregate", RULES)
@pytest.mark.parametrize("failure", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_a_rollout_with_an_unscored_step_is_left_out_and_counted(aggregate, failure, place):
    broken = [0.5, 0.5]
    broken[place] = failure
    result = assign("prm_outcome", step_group([*SCORES, broken, []]), aggregate=aggregate)
    without = assign("prm_outcome", step_group(SCORES), aggregate=aggregate)
    assert torch.equal(result.advantage_NT[:3], without.advantage_NT)
    assert result.advantage_NT[3:].eq(0).all()
    assert result.metrics["credit/unscored_rollouts"] == 2
    assert without.metrics["credit/unscored_rollouts"] == 0


@pytest.mark.parametrize("scores", [[[0.5], [0.5]], [[0.5], []], [[], []], [[0.5], [math.nan]]])
def test_equal_or_fewer_than_two_scores_give_exactly_zero(scores):
    assert assign("prm_outcome", step_group(scores)).advantage_NT.eq(0).all()


def test_every_trained_token_counts_also_one_of_no_step():
    group = step_group(SCORES)
    mask_NT = torch.ones_like(group.mask_NT)
    id_NT = group.step_id_NT.where(group.mask_NT, -1)
    values = {"mask_NT": mask_NT, "step_id_NT": id_NT}
    advantage_NT = assign("prm_outcome", changed(group, values)).advantage_NT
    assert torch.equal(advantage_NT[:, 1::2], assign("prm_outcome", group).advantage_NT[:, ::2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"agregate": "min"}, "unknown option 'agregate'; did you mean 'aggregate'"),
        ({"aggregate": "max"}, "aggregate is 'max'; it should be 'mean', 'min', 'last' or 'prod"),
        ({"base": "dapo"}, "base is 'dapo'; it should be 'grpo', 'dr_grpo' or 'rloo'"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        assign("prm_outcome", step_group(SCORES), **options)


def test_missing_steps_are_named_with_their_source():
    group = changed(step_group(SCORES), {"step_id_NT": None})
    with pytest.raises(ValueError, match=r"'prm_outcome' needs step_id_NT.*the step splitter"):
        assign("prm_outcome", group)
