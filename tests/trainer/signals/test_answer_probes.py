"""Where answers are tried, which ones, and how what the policy says of them is laid out."""

import math

import pytest
import torch
from trainer.signals.source_cases import ids_of, record, step, tokenizer

from megatron_credit.credit.segments import Segmenter
from megatron_credit.trainer.signals.config import ProbesSection
from megatron_credit.trainer.signals.probes import ProbeSource, distinct_answers

TAGS = {"opening": "<answer>", "closing": "</answer>"}
PARTS = Segmenter(kind="fixed", min_tokens=5, max_segments=16)


class Policy:
    """Says -(state + answer / 10), and remembers what it was asked."""

    def __init__(self):
        self.asked = []

    def probe_answers(self, rollouts):
        self.asked += rollouts
        return [
            torch.tensor(
                [
                    [-(state + column / 10) for column in range(len(one.continuations))]
                    for state in range(len(one.states))
                ]
            ).view(len(one.states), len(one.continuations))
            for one in rollouts
        ]


def compute(*groups, max_positions=512, entropies=None, segmenter=PARTS, **section):
    """What is found, and the rollouts that were probed."""
    policy = Policy()
    settings = ProbesSection(segmenter=segmenter, **TAGS | section)
    source = ProbeSource(settings, policy, tokenizer(), max_positions=max_positions)
    return source.compute(step("rredcot", *groups, entropies=entropies)), policy.asked


RIGHT = record(0, 1.0, "2+5=7;7+0=7;<answer>7</answer><|end|>", parsed="7")
WRONG = record(1, 0.0, "2+5=8;<answer>8</answer><|end|>", parsed="8")
LOST = record(2, 0.0, "2+5=7;2+5=7;2+5", parsed=None)
FAILED = record(3, None, "2+5=9;<answer>9</answer><|end|>", parsed="9")


def test_states_end_where_segments_do():
    found, asked = compute([RIGHT, WRONG, LOST, FAILED])
    # Six tokens a step; five to a segment, spread evenly over the chain.
    assert [one.states for one in asked] == [(0, 6, 12), (0, 6), (0, 5, 10, 15)]
    fields = found.fields[0]
    assert fields["segment_id_NT"].tolist() == [
        [0] * 6 + [1] * 6 + [3] * 4,
        [0] * 6 + [3] * 4 + [-1] * 6,
        [0] * 5 + [1] * 5 + [2] * 5 + [-1],
        [0] * 6 + [3] * 4 + [-1] * 6,
    ]


def test_every_answer_with_a_verdict_is_tried_once():
    twin = record(4, 0.0, WRONG.text, parsed="8")
    found, asked = compute([RIGHT, WRONG, LOST, FAILED, twin])
    fields = found.fields[0]
    assert fields["utility_Y"].tolist() == [1.0, 0.0]
    assert fields["answer_index_N"].tolist() == [0, 1, -1, -1, 1]
    continuations = [(one.opening_ids, one.answer_ids) for one in asked[0].continuations]
    opening = tuple(ids_of("<answer>"))
    assert continuations == [
        (opening, tuple(ids_of("7</answer>"))),
        (opening, tuple(ids_of("8</answer>"))),
    ]


def test_log_probs_of_one_state_more_than_segments():
    found, _ = compute([RIGHT, WRONG, LOST, FAILED])
    nan = [math.nan] * 2
    expected = [
        [[0, -0.1], [-1, -1.1], [-2, -2.1], nan],
        [[0, -0.1], [-1, -1.1], nan, nan],
        [[0, -0.1], [-1, -1.1], [-2, -2.1], [-3, -3.1]],
        [nan] * 4,
    ]
    torch.testing.assert_close(
        found.fields[0]["answer_logprob_NMY"],
        torch.tensor(expected, dtype=torch.float64),
        rtol=0,
        atol=1e-6,
        equal_nan=True,
    )


def test_a_rollout_whose_probes_are_too_long_has_none():
    prompt = len(RIGHT.prompt_ids)
    longest = prompt + 15 + len(ids_of("<answer>7</answer>"))
    found, asked = compute([RIGHT, WRONG, LOST], max_positions=longest)
    assert len(asked) == 3
    found, asked = compute([RIGHT, WRONG, LOST], max_positions=longest - 1)
    assert [one.states[-1] for one in asked] == [12, 6]
    logprob_NPY = found.fields[0]["answer_logprob_NMY"]
    assert logprob_NPY.shape == (3, 4, 2)
    assert logprob_NPY[2].isnan().all()


def test_groups_of_equal_rewards_are_not_asked():
    found, asked = compute([WRONG, LOST], [RIGHT, WRONG], [RIGHT, RIGHT])
    assert list(found.fields) == [1]
    assert len(asked) == 2
    assert list(found.notes) == [(1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("text", "chain"),
    [
        ("1+1=2;<answer>2</answer>", 6),
        ("1+1=2;", 6),
        ("<answer>2</answer>", 0),
        # The last complete answer counts, as it does for the verifier.
        ("1;<answer>3</answer>2;<answer>2</answer>", 7),
        ("1;<answer>3</answer>2;<answer>", 2),
        ("1;<answer>3", 4),
        ("1;3</answer>", 4),
    ],
)
def test_the_answer_begins_where_the_last_complete_one_does(text, chain):
    one = record(0, 1.0, text, parsed="2")
    found, _ = compute([one, WRONG], segmenter=Segmenter(kind="fixed", min_tokens=1000))
    segments = found.fields[0]["segment_id_NT"][0, : len(one.response_ids)].tolist()
    num_segments = 1
    assert segments == [0] * chain + [num_segments] * (len(segments) - chain)


def test_thinking_is_closed_in_states_within_it_only():
    text = "2+5=7;2+5=7</think>7;<answer>7</answer>"
    thinking = record(0, 1.0, text, parsed="7")
    closed = len(ids_of("2+5=7;2+5=7</think>"))
    found, asked = compute([thinking, WRONG], thinking_end="</think>")
    openings = [(one.states, one.continuations[0].opening_ids) for one in asked]
    tags, end = tuple(ids_of("<answer>")), tuple(ids_of("</think><answer>"))
    states = sorted(state for own, _ in openings[:-1] for state in own)
    assert len(states) > 3 and states[-1] == closed + 2
    within = tuple(state for state in states if state < closed)
    behind = tuple(state for state in states if state >= closed)
    # The other one never closed its thinking.
    assert openings == [(within, end), (behind, tags), ((0, 6), end)]
    logprob_PY = found.fields[0]["answer_logprob_NMY"][0]
    assert logprob_PY.shape[0] == len(states) and not logprob_PY.isnan().any()


def test_peaks_of_the_entropy_cut():
    entropies = [[[0.1] * 16, [0.1] * 10]]
    entropies[0][0][4] = 2.0
    found, asked = compute(
        [RIGHT, WRONG], entropies=entropies, segmenter=Segmenter(kind="entropy", min_tokens=2)
    )
    assert [one.states for one in asked] == [(0, 4, 12), (0, 6)]
    spans = found.notes[0, 0].spans["segment"]
    assert [(span.start, span.end) for span in spans] == [(0, 4), (4, 12)]


def test_a_group_that_nobody_answered():
    found, asked = compute([LOST, record(1, 1.0, "7", parsed=None)])
    assert found.fields[0]["utility_Y"].tolist() == []
    assert found.fields[0]["answer_logprob_NMY"].shape[2] == 0
    assert found.fields[0]["answer_index_N"].tolist() == [-1, -1]
    assert all(not one.continuations for one in asked)


def test_distinct_answers():
    data = step("rredcot", [RIGHT, WRONG, LOST, FAILED])
    assert distinct_answers(data.groups[0], data.records[0]) == (["7", "8"], [0, 1, -1, -1])
