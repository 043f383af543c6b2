"""Signals, method and parts put together, and what a rollout's record tells of them."""

import pytest
import torch
from trainer.signals.source_cases import record

from megatron_credit.batch.rollout import Span
from megatron_credit.batch.rollout_files import read_rollouts, write_rollouts
from megatron_credit.batch.scored import Scored
from megatron_credit.trainer.config import CreditSection
from megatron_credit.trainer.credit_stage import CreditStage
from megatron_credit.trainer.experience import Experience, to_sequence, with_credit
from megatron_credit.trainer.signals.step import Found
from megatron_credit.trainer.signals.teacher import TeacherSource


class Policy:
    """Log-prob -1 of every token, as the teacher -0.25 x its number from 1."""

    def __init__(self):
        self.scored = 0

    def score(self, sequences):
        self.scored += 1
        return [
            Scored(
                logprob_T=torch.full((one.num_response,), -1.0),
                entropy_T=torch.full((one.num_response,), 0.5),
            )
            for one in sequences
        ]

    def teacher_logprobs(self, sequences):
        return [-torch.arange(1.0, one.num_response + 1) / 4 for one in sequences]


def experience_of(*groups):
    rollouts = [one for group in groups for one in group]
    return Experience(
        sequences=[to_sequence(one) for one in rollouts],
        reward_R=torch.tensor([one.reward for one in rollouts]),
        group_size=len(groups[0]),
        records=rollouts,
    )


def stage_of(method, policy, *sources, num_parts=1):
    return CreditStage(
        credit=CreditSection(method=method),
        seed=1,
        num_parts=num_parts,
        scorer=policy,
        sources=sources,
    )


GROUPS = ([record(0, 1.0, "123"), record(1, 0.0, "12")], [record(0, 0.0, "1")] * 2)


def test_what_the_policy_finds_stays_beside_what_sources_find():
    policy = Policy()
    credited = stage_of("opd", policy, TeacherSource(policy)).assign(1, experience_of(*GROUPS))
    (part,) = credited.parts
    advantages = [one.advantage_T.tolist() for one in part.sequences]
    assert advantages == [[0.75, 0.5, 0.25], [0.75, 0.5], [0.75], [0.75]]
    assert policy.scored == 1
    assert credited.notes[1].token_values == {"teacher_logprob": [-0.25, -0.5]}
    assert part.teaching is None


def test_several_updates_refer_to_the_policy_before_the_first():
    policy = Policy()
    credited = stage_of("grpo", policy, num_parts=2).assign(1, experience_of(*GROUPS))
    first, second = credited.parts
    assert [len(part.sequences) for part in credited.parts] == [2, 2]
    for one in (*first.sequences, *second.sequences):
        assert one.old_logprob_T.tolist() == [-1.0] * one.num_response
    assert second.sequences[0].advantage_T.tolist() == [0.0]
    assert first.sequences[1].advantage_T.tolist() == pytest.approx([-0.7071] * 2, abs=1e-4)


def test_a_single_update_scores_nothing():
    policy = Policy()
    (part,) = stage_of("grpo", policy).assign(1, experience_of(*GROUPS)).parts
    assert policy.scored == 0
    assert all(one.old_logprob_T is None for one in part.sequences)


class Told:
    """A source with a note on the second rollout."""

    signals = ()

    def __init__(self, name):
        self.name = name

    def compute(self, data):
        found = Found(metrics={f"{self.name}/x": 1.0})
        note = found.note(0, 1)
        note.token_values[self.name] = [0.25, float("nan")]
        note.spans[self.name] = [Span(0, 2, 0.5)]
        note.evidence[self.name] = "text"
        return found


def test_notes_of_all_sources_reach_the_record(tmp_path):
    stage = stage_of("grpo", Policy(), Told("a"), Told("b"))
    experience = experience_of(*GROUPS)
    credited = stage.assign(1, experience)
    assert credited.metrics["a/x"] == credited.metrics["b/x"] == 1.0
    (part,) = credited.parts
    written = [
        with_credit(*four)
        for four in zip(
            experience.records,
            part.sequences,
            Policy().score(part.sequences),
            credited.notes,
            strict=True,
        )
    ]
    write_rollouts(tmp_path / "r.jsonl", written)
    first, second, *_ = read_rollouts(tmp_path / "r.jsonl")
    assert set(first.token_values) == {"policy_logprob", "entropy"}
    assert (first.spans, first.evidence) == ({}, {})
    assert second.token_values["policy_logprob"] == [-1.0, -1.0]
    assert second.token_values["entropy"] == [0.5, 0.5]
    assert str(second.token_values["a"]) == str(second.token_values["b"]) == "[0.25, nan]"
    assert second.spans == {"a": [Span(0, 2, 0.5)], "b": [Span(0, 2, 0.5)]}
    assert second.evidence == {"a": "text", "b": "text"}
    assert second.advantages == part.sequences[1].advantage_T.tolist()
