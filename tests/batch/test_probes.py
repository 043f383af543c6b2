"""Answer probes: what may be asked, which tokens are read for it, and what each of them sees."""

import pytest
import torch

from megatron_credit.batch.packing import Padding, context_positions
from megatron_credit.batch.probes import (
    STATE,
    Continuation,
    ProbedRollout,
    Questions,
    check_probe,
    grow,
    untrained,
)
from megatron_credit.batch.tree_packing import TreePacker

PADDING = Padding(sequence=4, total=8)


def answers(opening, *each):
    return tuple(Continuation(opening_ids=opening, answer_ids=one) for one in each)


def make_rollout(token_ids, num_prompt, states, continuations):
    return ProbedRollout(
        sequence=untrained(torch.tensor(token_ids), num_response=len(token_ids) - num_prompt),
        states=states,
        continuations=continuations,
    )


TREES = [
    make_rollout([1, 2, 3, 4, 5], 2, (0, 2), answers((7,), (8, 9), (8, 6, 9), (5,))),
    make_rollout([1], 1, (0,), answers((), (3,), (4,), (3,))),
    make_rollout([6, 5, 4], 1, (1, 2), answers((), (2, 2), (2,), (1, 2, 3))),
    make_rollout(list(range(10, 21)), 4, (0, 3, 7), answers((7, 7), (1, 2, 3), (1, 2, 4))),
]


def test_answers_share_what_they_begin_with():
    branches = grow(answers((7,), (8, 9), (8, 6, 9), (5,), (8, 9)))
    # Behind 7 stands 8, and behind that 6; 9 and 5 are only predicted.
    assert branches.token_ids == (7, 8, 6)
    assert branches.depths == (0, 1, 2)
    assert branches.ends == (3, 3, 3)
    assert branches.edges == ((0, 8), (1, 9), (1, 6), (2, 9), (0, 5))
    assert branches.paths == ((0, 1), (0, 2, 3), (4,), (0, 1))


def test_branches_stand_before_those_that_do_not_follow_them():
    branches = grow(answers((), (4, 2, 1), (3, 3, 3, 3), (4, 1, 1)))
    assert branches.token_ids == (3, 3, 3, 4, 1, 2)
    assert branches.depths == (0, 1, 2, 0, 1, 1)
    assert branches.ends == (3, 3, 3, 6, 5, 6)
    assert branches.paths[0] == (0, 1, 2) and branches.edges[:3] == ((STATE, 4), (3, 2), (5, 1))


def test_nothing_is_read_for_answers_of_one_token():
    branches = grow(answers((), (3,), (4,), (3,)))
    assert branches.token_ids == ()
    assert branches.edges == ((STATE, 3), (STATE, 4))
    assert branches.paths == ((0,), (1,), (0,))


def test_the_same_tokens_may_be_opening_and_answer():
    branches = grow((*answers((5,), (6, 7)), *answers((5, 6), (7,)), *answers((), (5, 6, 7))))
    assert branches.token_ids == (5, 6)
    assert branches.edges == ((0, 6), (1, 7), (STATE, 5))
    assert branches.paths == ((0, 1), (1,), (2, 0, 1))


def test_an_answer_adds_up_its_edges():
    branches = grow(answers((7,), (8, 9), (8, 6, 9), (5,)))
    logprob_PE = torch.tensor([[-1.0, -2.0, -4.0, -8.0, -16.0], [0.0, -1.0, 0.0, 0.0, -3.0]])
    assert branches.answers_PY(logprob_PE).tolist() == [[-3.0, -13.0, -16.0], [-1.0, 0.0, -3.0]]


def test_long_answers_are_no_deep_recursion():
    branches = grow(answers((), tuple(range(5000)), tuple(range(4000))))
    assert branches.token_ids == tuple(range(4999))
    assert len(branches.edges) == 5000 and branches.paths[1] == tuple(range(4000))


def expected_sight(rollout, length):
    """For each place: position and what it sees, by walking through every probe."""
    num_prompt, branches = rollout.sequence.num_prompt, grow(rollout.continuations)
    trunk = rollout.sequence.token_ids_L[: rollout.num_trunk].tolist()
    position = list(range(len(trunk)))
    sees = [set(range(place + 1)) for place in range(len(trunk))]
    tokens = list(trunk)
    for state in rollout.states:
        place_of = {}
        for read_ids in sorted({one.read_ids for one in rollout.continuations}):
            for count in range(1, len(read_ids) + 1):
                text = read_ids[:count]
                if text not in place_of:
                    place_of[text] = len(tokens)
                    tokens.append(text[-1])
                    position.append(num_prompt + state + count - 1)
                    above = {place_of[text[:end]] for end in range(1, count + 1)}
                    sees.append(set(range(num_prompt + state)) | above)
        assert len(place_of) == len(branches.token_ids)
    sees += [{place} for place in range(len(tokens), length)]
    return tokens, position, sees


@pytest.mark.parametrize("size", [1, 2])
def test_every_token_sees_what_it_follows(size):
    packer = TreePacker(TREES, padding=PADDING)
    indices = (2, 0, 3, 1)
    whole = packer.pack(indices)
    bounds = list(zip(whole.boundaries_B1[:-1], whole.boundaries_B1[1:], strict=True))
    for rank in range(size):
        share = packer.share(indices, rank=rank, size=size)
        sight = share.sight()
        assert torch.equal(sight.position_P, share.position_ids_P)
        first = 0
        for number, (start, stop) in enumerate(bounds):
            length = int(stop - start)
            orders = [
                context_positions(torch.tensor([0, length]), rank=r, size=size).tolist()
                for r in range(size)
            ]
            tokens, position, sees = expected_sight(TREES[indices[number]], length)
            keys = [place for order in orders for place in order]
            causal = sight.num_causal[number]
            assert causal == (TREES[indices[number]].num_trunk if size == 1 else 0)
            assert sight.lengths[number] == length // size
            for row, place in enumerate(orders[rank]):
                if place < len(tokens):
                    assert share.token_ids_P[first + row] == tokens[place]
                    assert sight.position_P[first + row] == position[place]
                if row >= causal:
                    mask_L = sight.masks[number][row - causal]
                    assert {keys[key] for key in mask_L.nonzero()[:, 0].tolist()} == sees[place]
            first += length // size


def test_ranks_hold_each_edge_once_where_it_is_predicted():
    packer = TreePacker(TREES, padding=PADDING)
    indices = (3, 1, 0, 2)
    # TREES[1] predicts 3 and 4 at its only token; its slots follow the 10 of TREES[0].
    assert packer.edges == [0, 10, 12, 22, 34]
    whole = packer.share(indices, rank=0, size=1)
    assert sorted(whole.edge_slot_E.tolist()) == list(range(34))
    of_slot = dict(zip(whole.edge_slot_E.tolist(), whole.row_E.tolist(), strict=True))
    target = dict(zip(whole.edge_slot_E.tolist(), whole.edge_target_E.tolist(), strict=True))
    start = int(whole.boundaries_B1[1])
    assert [of_slot[10], of_slot[11]] == [start, start] and [target[10], target[11]] == [3, 4]
    found = {}
    for rank in range(2):
        held_P = context_positions(whole.boundaries_B1, rank=rank, size=2)
        share = packer.share(indices, rank=rank, size=2)
        rows = held_P[share.row_E].tolist()
        for slot, row, token in zip(
            share.edge_slot_E.tolist(), rows, share.edge_target_E.tolist(), strict=True
        ):
            assert slot not in found
            found[slot] = row, token
    assert found == {slot: (of_slot[slot], target[slot]) for slot in range(34)}


def test_a_dummy_is_padding_that_sees_itself():
    dummy = TreePacker(TREES, padding=PADDING).share((), rank=0, size=1)
    sight = dummy.sight()
    assert sight.lengths == (8,) and sight.num_causal == (0,)
    assert torch.equal(sight.masks[0], torch.eye(8, dtype=torch.bool))
    assert len(dummy.row_E) == 0


def test_a_rollout_that_needs_no_branches_is_plainly_causal():
    share = TreePacker([TREES[1]], padding=Padding()).share((0,), rank=0, size=1)
    assert share.sight().num_causal == (1,) and share.sight().masks == (None,)


def test_micro_batches_are_planned_with_all_branches():
    packer = TreePacker(TREES, padding=Padding())
    # Trunk, and states x tokens behind each.
    assert packer.lengths_N() == [4 + 2 * 3, 1, 3 + 2 * 3, 11 + 3 * 4]
    plan = packer.plan(max_tokens=20, num_ranks=1, multiple_of=1)
    assert sorted(plan[0]) == [(0, 1, 2), (3,)]


def test_each_question_is_asked_once():
    some, others = answers((), (1,), (2,)), answers((), (1,), (3,))
    rollouts = [
        make_rollout([1, 2, 3, 4, 5], 2, (0, 2, 3), some),
        make_rollout([1, 2, 3, 4, 6], 2, (0, 1, 2, 3), some),
        make_rollout([1, 2, 3, 4, 5], 2, (), some),
        make_rollout([1, 2, 3, 4, 5], 2, (0,), ()),
        make_rollout([1, 2, 3, 4, 5], 2, (2, 3), some),
        make_rollout([1, 2, 3, 4], 2, (0, 2), others),
        # The same tokens again, of which others are the prompt.
        make_rollout([1, 2, 3, 4, 5], 4, (0, 1), some),
    ]
    questions = Questions.of(rollouts)
    first, second, third = questions.rollouts
    assert first.states == (0, 2, 3) and first.sequence is rollouts[0].sequence
    assert second.states == (1, 3) and second.sequence is rollouts[1].sequence
    assert third.states == (0, 2) and third.continuations == others
    assert questions.places == (
        ((0, 0), (0, 1), (0, 2)),
        ((0, 0), (1, 0), (0, 1), (1, 1)),
        (),
        (),
        ((0, 1), (0, 2)),
        ((2, 0), (2, 1)),
        ((0, 1), (0, 2)),
    )


@pytest.mark.parametrize("states", [(0, 0), (2, 1), (-1,), (0, 4)])
def test_states_are_ascending_parts_of_the_response(states):
    with pytest.raises(
        ValueError, match=r"of a response of 3 tokens; expected ascending .* 0 .. 3"
    ):
        make_rollout([1, 2, 3, 4, 5], 2, states, ())


def test_a_continuation_has_something_to_score():
    with pytest.raises(ValueError, match="no answer_ids; expected at least the closing"):
        Continuation(opening_ids=(1,), answer_ids=())


def test_a_probe_fits_the_model():
    rollout = TREES[0]
    assert rollout.longest == 4 + 4
    check_probe("it", rollout, vocab_size=10, max_positions=8)
    with pytest.raises(ValueError, match="it: its longest probe has 8 tokens, the model 7"):
        check_probe("it", rollout, vocab_size=10, max_positions=7)
    with pytest.raises(ValueError, match=r"it, continuation 0 has token ids outside of 0 .. 8"):
        check_probe("it", rollout, vocab_size=9, max_positions=8)
