"""Who serves as whose evidence: literal cases."""

import math

import pytest
import torch

from megatron_credit.credit.evidence import (
    draw_siblings,
    has_evidence,
    pick_references,
    pick_siblings,
    pick_wrong_answer,
)

NAN = math.nan


def rewards(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_siblings_are_the_first_others():
    positive_N, negative_NK = pick_siblings(rewards(0, 1, NAN, 0, 1), negatives=2)
    assert positive_N.tolist() == [1, 4, 1, 1, 1]
    assert negative_NK.tolist() == [[3, -1], [0, 3], [0, 3], [0, -1], [0, 3]]


def test_no_sibling_is_minus_one():
    positive_N, negative_NK = pick_siblings(rewards(1, 1))
    assert positive_N.tolist() == [1, 0]
    assert negative_NK.tolist() == [[-1], [-1]]


def test_references_with_some_verified_are_verified_others():
    reward_N = rewards(1, 0, 1, NAN, 0)
    draws = torch.stack([pick_references(reward_N, seed=seed) for seed in range(200)])
    assert draws[:, 0].unique().tolist() == [2]
    assert draws[:, 2].unique().tolist() == [0]
    assert draws[:, 1].unique().tolist() == [0, 2]
    assert draws[:, 3].unique().tolist() == [-1]
    assert 60 < int((draws[:, 4] == 0).sum()) < 140


def test_references_with_none_verified_share_one():
    for seed in range(20):
        reference_N = pick_references(rewards(0, 0, NAN, 0), seed=seed)
        (chosen,) = set(reference_N.tolist()) - {-1}
        assert chosen in (0, 1, 3)
        assert reference_N[chosen] == -1
        assert reference_N[2] == -1
        assert int((reference_N == chosen).sum()) == 2


def test_no_references_with_one_or_all_verified():
    assert pick_references(rewards(1, 0, 0), seed=0).tolist() == [-1, -1, -1]
    assert pick_references(rewards(1, NAN, 1), seed=0).tolist() == [-1, -1, -1]


def test_references_follow_the_seed():
    reward_N = rewards(*[1, 0] * 20)
    assert torch.equal(pick_references(reward_N, seed=4), pick_references(reward_N, seed=4))
    assert not torch.equal(pick_references(reward_N, seed=4), pick_references(reward_N, seed=5))


def test_wrong_answer_is_the_lowest_and_then_the_first():
    assert pick_wrong_answer(rewards(0.2, 1, 0, 0, NAN)).tolist() == [2] * 5
    excluded = pick_wrong_answer(rewards(0.2, 1, 0, 0, NAN), exclude_self=True)
    assert excluded.tolist() == [2, 2, 3, 2, 2]
    assert pick_wrong_answer(rewards(0, 1), exclude_self=True).tolist() == [-1, 0]
    assert pick_wrong_answer(rewards(1, 1)).tolist() == [-1, -1]


def test_one_verified_rollout_serves_the_others_under_scope_all():
    reward_N = rewards(0, 1, NAN, 0)
    assert pick_references(reward_N, seed=3, scope="all").tolist() == [1, -1, -1, 1]
    assert pick_references(rewards(1, 1), seed=3, scope="all").tolist() == [-1, -1]


def test_an_empty_group_has_no_evidence():
    nobody = rewards()
    positive_N, negative_NK = pick_siblings(nobody, negatives=3)
    assert positive_N.shape == (0,) and negative_NK.shape == (0, 3)
    assert pick_references(nobody, seed=0).shape == pick_wrong_answer(nobody).shape == (0,)


def test_siblings_need_at_least_one_negative():
    with pytest.raises(ValueError, match="negatives=0"):
        pick_siblings(rewards(1, 0), negatives=0)


def test_drawn_siblings_are_others_without_repeats():
    reward_N = rewards(0, 1, NAN, 0, 1, 0, 0, 0)
    verified, wrong = {1, 4}, {0, 3, 5, 6, 7}
    seen = set()
    for seed in range(100):
        positive_N, negative_NK = draw_siblings(reward_N, seed=seed)
        assert negative_NK.shape == (8, 4)
        for row, (positive, negatives) in enumerate(
            zip(positive_N.tolist(), negative_NK.tolist(), strict=True)
        ):
            assert positive in verified - {row}
            # Each wrong row has just four others, which are all drawn, in some order.
            assert len(set(negatives)) == 4 and set(negatives) <= wrong - {row}
        seen.add((int(positive_N[0]), *negative_NK[1].tolist()))
    assert len(seen) > 60
    assert {first for first, *_ in seen} == verified


def test_drawn_siblings_run_out_and_follow_the_seed():
    positive_N, negative_NK = draw_siblings(rewards(1, 0, 0), seed=3, negatives=2)
    assert positive_N.tolist() == [-1, 0, 0]
    assert sorted(negative_NK[0].tolist()) == [1, 2]
    assert negative_NK[1:].tolist() == [[2, -1], [1, -1]]
    reward_N = rewards(*[1, 0] * 20)
    first, again = draw_siblings(reward_N, seed=4), draw_siblings(reward_N, seed=4)
    other = draw_siblings(reward_N, seed=5)
    assert all(map(torch.equal, first, again)) and not torch.equal(first[1], other[1])
    with pytest.raises(ValueError, match="negatives=0"):
        draw_siblings(reward_N, seed=0, negatives=0)


def test_evidence_is_a_finite_value_for_every_trained_token():
    mask_NT = torch.tensor([[True, True], [True, False], [True, True], [False, False]])
    first_NT = torch.tensor([[1.0, 2.0], [1.0, NAN], [1.0, math.inf], [NAN, NAN]])
    assert has_evidence(mask_NT, first_NT).tolist() == [True, True, False, True]
    second_NT = torch.tensor([[1.0, NAN], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]])
    assert has_evidence(mask_NT, first_NT, second_NT).tolist() == [False, True, False, True]
