"""From rollouts to advantages, and the choices that make a run repeatable."""

import math
from itertools import pairwise

import pytest
import torch

from megatron_credit.batch.rollout import Rollout, VersionSpan
from megatron_credit.batch.rollout_files import read_rollouts, write_rollouts
from megatron_credit.trainer.config import CreditSection
from megatron_credit.trainer.credit_stage import CreditStage
from megatron_credit.trainer.experience import Experience, to_sequence
from megatron_credit.trainer.loop import mean_metrics
from megatron_credit.trainer.sampler import derive_seed, distinct_names, group_metrics


def rollout(sample, reward, length):
    return Rollout(
        prompt_id="p",
        sample=sample,
        prompt_ids=[5, 6],
        response_ids=list(range(length)),
        logprobs=[-0.5] * length,
        mask=[True] * length,
        versions=[VersionSpan(3, 0, length)],
        finish_reason="stop",
        text="x",
        answer="1",
        reward=reward,
    )


class NobodyAsks:
    """A policy whose log-probs nobody may ask for."""

    def score(self, sequences):
        raise AssertionError("the method reads rewards alone")


def test_credit_of_two_groups():
    rollouts = [rollout(0, 1.0, 3), rollout(1, 0.0, 1), rollout(0, math.nan, 2), rollout(1, 1.0, 4)]
    experience = Experience(
        sequences=[to_sequence(r) for r in rollouts],
        reward_R=torch.tensor([r.reward for r in rollouts]),
        group_size=2,
    )
    stage = CreditStage(
        credit=CreditSection(method="dr_grpo"), seed=0, num_parts=1, scorer=NobodyAsks()
    )
    credited = stage.assign(1, experience)
    (part,), metrics = credited.parts, credited.metrics
    advantages = [sequence.advantage_T.tolist() for sequence in part.sequences]
    assert advantages == [[0.5] * 3, [-0.5], [0.0] * 2, [0.0] * 4]
    assert metrics["group/invalid_rewards"] == 0.5
    assert metrics["group/singleton"] == 0.5
    assert metrics["credit/zero_tokens"] == 0.6
    assert metrics["credit/abs_mean"] == pytest.approx(0.2)


def test_sequences_hold_the_rollouts_ids():
    sequence = to_sequence(rollout(0, 1.0, 3))
    assert sequence.token_ids_L.tolist() == [5, 6, 0, 1, 2]
    assert sequence.num_prompt == 2
    assert sequence.rollout_logprob_T.tolist() == [-0.5] * 3


def test_group_metrics():
    groups = [
        [rollout(0, 1.0, 3), rollout(1, 0.0, 1)],
        [rollout(0, 1.0, 2), rollout(1, 1.0, 4)],
    ]
    metrics = group_metrics(groups)
    assert metrics["reward/mean"] == 0.75
    assert metrics["group/equal_rewards"] == 0.5
    assert metrics["rollout/tokens"] == 10
    assert metrics["rollout/length_max"] == 4


def test_rollout_files_round_trip(tmp_path):
    rollouts = [rollout(0, 1.0, 3), rollout(1, math.nan, 1)]
    write_rollouts(tmp_path / "r.jsonl", rollouts)
    first, second = read_rollouts(tmp_path / "r.jsonl")
    assert first == rollouts[0]
    assert math.isnan(second.reward)


def test_a_prompt_that_comes_twice_in_a_step_gets_other_samples():
    assert distinct_names(["a", "b", "a", "a"]) == ["a", "b", "a#1", "a#2"]


def test_seeds_depend_on_their_arguments_alone_and_lie_far_apart():
    seeds = {
        derive_seed(seed, f"train-{step}", f"p{prompt}")
        for seed in range(3)
        for step in range(20)
        for prompt in range(20)
    }
    assert len(seeds) == 1200
    assert all(0 <= seed < 2**31 for seed in seeds)
    ordered = sorted(seeds)
    # The samples of a request count upwards; 8 of them must not run into the next request's.
    close = sum(b - a < 8 for a, b in pairwise(ordered))
    assert close <= 2
    assert derive_seed(1, "train-1", "p") == derive_seed(1, "train-1", "p")


def test_metrics_of_several_updates():
    parts = [{"loss": 1.0, "mismatch/x_max": 3.0}, {"loss": 2.0, "mismatch/x_max": 1.0}]
    assert mean_metrics(parts) == {"loss": 1.5, "mismatch/x_max": 3.0}
