"""Which texts serve as evidence for which rollouts, for every kind of need."""

import math

import pytest
import torch
from trainer.record_cases import rollout

from megatron_credit.credit import Group
from megatron_credit.credit.need import EvidenceNeed
from megatron_credit.trainer.signals.choice import Evidence, choose_evidence
from megatron_credit.trainer.signals.config import EvidenceSection

NAN = math.nan
REWARDS = (0.0, 1.0, NAN, 1.0, 0.0)


def group_of(rewards, seed=0):
    mask_NT = torch.ones(len(rewards), 2, dtype=torch.bool)
    return Group(reward_N=torch.tensor(rewards), mask_NT=mask_NT, seed=seed)


def records(rewards, **changes):
    """Texts t0, t1, ..; parsed answers p0, p1, .."""
    return [
        rollout(sample=row, reward=reward, text=f"t{row}", parsed=f"p{row}", answer="7", **changes)
        for row, reward in enumerate(rewards)
    ]


def choose(need, rewards=REWARDS, rollouts=None, seed=0, **section):
    found = rollouts if rollouts is not None else records(rewards)
    return choose_evidence(need, EvidenceSection(**section), group_of(rewards, seed), found)


def pairs(chosen):
    return [(one.positive, one.negatives) for one in chosen]


def test_siblings_are_the_first_ones_but_the_own():
    need = EvidenceNeed(positive="sibling", negative="sibling")
    assert pairs(choose(need)) == [
        ("t1", ("t4",)),
        ("t3", ("t0",)),
        ("t1", ("t0",)),
        ("t1", ("t0",)),
        ("t1", ("t0",)),
    ]


def test_as_many_wrong_siblings_as_the_run_says():
    need = EvidenceNeed(positive="sibling", negative="sibling")
    chosen = choose(need, (0.0, 0.0, 1.0, 0.0), negatives=2)
    assert pairs(chosen) == [
        ("t2", ("t1", "t3")),
        ("t2", ("t0", "t3")),
        (None, ()),  # nothing to contrast them with
        ("t2", ("t0", "t1")),
    ]
    assert pairs(choose(need, (1.0, 1.0))) == [(None, ())] * 2


def test_a_contrast_with_no_evidence_has_no_wrong_siblings():
    need = EvidenceNeed(positive="sibling", negative="sibling", free=True)
    rewards = (1.0, 0.0, 0.0)
    expected = [(None, ()), ("t0", ()), ("t0", ())]
    assert pairs(choose(need, rewards, contrast="fixed")) == expected
    assert pairs(choose(need, rewards)) == [(None, ()), ("t0", ("t2",)), ("t0", ("t1",))]


def test_siblings_without_a_negative_side():
    assert pairs(choose(EvidenceNeed(positive="sibling"), (1.0, 0.0))) == [(None, ()), ("t0", ())]


def test_drawn_siblings_follow_from_the_seed():
    need = EvidenceNeed(positive="drawn_sibling", negative="drawn_sibling", negatives=2)
    rewards = (1.0, 0.0, 1.0, 0.0, 0.0, 1.0, NAN)
    seen = set()
    for seed in range(20):
        chosen = choose(need, rewards, seed=seed)
        assert pairs(chosen) == pairs(choose(need, rewards, seed=seed))
        for row, one in enumerate(chosen):
            assert one.positive in {"t0", "t2", "t5"} - {f"t{row}"}
            assert len(set(one.negatives)) == 2
            assert set(one.negatives) <= {"t1", "t3", "t4"} - {f"t{row}"}
        seen.add(tuple(pairs(chosen)))
    assert len(seen) > 10


def test_references_name_the_rollout_that_they_are():
    need = EvidenceNeed(positive="reference")
    chosen = choose(need, (0.0, 1.0, 1.0, NAN))
    assert [one.reference for one in chosen][1:] == [2, 1, -1]
    assert chosen[0].reference in (1, 2)
    assert [one.positive for one in chosen][1:] == ["t2", "t1", None]


def test_a_single_verified_rollout_is_everybodys_reference_but_its_own():
    chosen = choose(EvidenceNeed(positive="reference"), (0.0, 1.0, 0.0))
    assert [(one.positive, one.reference) for one in chosen] == [("t1", 1), (None, -1), ("t1", 1)]


def test_a_wrong_rollout_is_the_reference_where_all_are():
    chosen = choose(EvidenceNeed(positive="reference"), (0.0, 0.0, 0.0))
    (reference,) = {one.reference for one in chosen} - {-1}
    expected = [None if row == reference else f"t{reference}" for row in range(3)]
    assert [one.positive for one in chosen] == expected


def test_nobody_has_a_reference_where_all_are_right():
    chosen = choose(EvidenceNeed(positive="reference"), (1.0, 1.0))
    assert pairs(chosen) == [(None, ())] * 2


ANSWERS = EvidenceNeed(positive="answer", negative="answer")


def test_answers_are_the_reference_and_the_first_wrong_one():
    assert pairs(choose(ANSWERS)) == [("7", ("p0",))] * 5


def test_a_wrong_rollout_may_get_the_next_wrong_answer():
    chosen = choose(ANSWERS, exclude_self=True)
    assert [one.negatives for one in chosen] == [("p4",), *[("p0",)] * 4]


def test_the_lowest_reward_is_the_wrong_one():
    assert pairs(choose(ANSWERS, (1.0, 0.4, 0.2))) == [("7", ("p2",))] * 3


def test_what_was_not_parsed_stands_with_fifty_characters():
    rollouts = [rollout(reward=0.0, text="x" * 49 + "yzz", parsed=None, answer="7")]
    (one,) = choose(ANSWERS, (0.0,), rollouts)
    assert one.negatives == ("x" * 49 + "y",)


def test_empty_answers_are_none():
    rollouts = [rollout(reward=0.0, text="", parsed=None, answer="")]
    assert pairs(choose(ANSWERS, (0.0,), rollouts)) == [(None, ())]


def test_there_is_no_wrong_answer_where_all_are_right_or_nobody_asks():
    assert pairs(choose(ANSWERS, (1.0, 1.0))) == [("7", ())] * 2
    assert pairs(choose(EvidenceNeed(positive="answer"))) == [("7", ())] * 5


def test_solutions_come_with_the_prompt():
    need = EvidenceNeed(positive="solution")
    rollouts = records((0.0, 1.0), metadata={"solution": "2+5=7"})
    assert pairs(choose(need, (0.0, 1.0), rollouts)) == [("2+5=7", ())] * 2
    assert pairs(choose(need, (0.0, 1.0))) == [(None, ())] * 2


@pytest.mark.parametrize(
    ("evidence", "expected"),
    [
        (Evidence(None), {}),
        (Evidence("a"), {"positive": "a"}),
        (Evidence("a", ("b",)), {"positive": "a", "negative": "b"}),
        (Evidence(None, ("b", "c")), {"negative 1": "b", "negative 2": "c"}),
    ],
)
def test_texts_by_role(evidence, expected):
    assert evidence.texts() == expected
