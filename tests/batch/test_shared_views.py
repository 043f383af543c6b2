"""Views that share what they begin with are read once, and each response token finds its rows."""

import pytest
import torch
from batch.test_views import make_sequence

from megatron_credit.batch.packing import IGNORED, Padding
from megatron_credit.batch.shared_views import SharedViewPacker
from megatron_credit.batch.view_packing import ViewPacker
from megatron_credit.batch.views import Views

EVIDENCE = torch.tensor([8, 8, 1, 2])


def rollouts():
    """Two prompts; the first has rollouts that are the same, begin alike, lack views or are
    empty."""
    made = [
        ([8, 1], [5, 6, 7], (EVIDENCE, None)),
        ([8, 1], [5, 6, 7], (EVIDENCE, None)),
        ([8, 1], [5, 6, 9, 4], (EVIDENCE, torch.tensor([3]))),
        ([8, 1], [5], (EVIDENCE[:3], torch.tensor([3]))),
        ([8, 1], [], (EVIDENCE, torch.tensor([3]))),
        ([8, 2], [5, 6], (None, None)),
    ]
    return [
        Views.behind(make_sequence(prompt, response), list(prompts))
        for prompt, response, prompts in made
    ]


def packer(total=1):
    views = rollouts()
    return SharedViewPacker(views, weights=[1.0] * len(views), padding=Padding(total=total))


def read_before(views, context, token):
    """What is read when response token `token` is predicted in this context."""
    view = views.teachers[context - 1] if context else views.plain
    return view.token_ids_L[: view.num_prompt + token].tolist()


def beginnings(batch):
    """For each position, the tokens up to it."""
    shared, path_P, start = batch.shared, {}, 0
    for length, before in zip(shared.lengths, shared.before, strict=True):
        path = [] if before is None else before.tolist()
        for position in range(start, start + length):
            path = [*path, position]
            path_P[position] = batch.token_ids_P[path].tolist()
        start += length
    return path_P


@pytest.mark.parametrize("indices", [(0, 1, 2, 3, 4, 5), (2, 4), (4,), ()], ids=str)
@pytest.mark.parametrize("total", [1, 4])
@pytest.mark.parametrize("way", ["together", "apart", "trained"])
def test_each_token_finds_what_is_read_of_it(indices, total, way):
    own = packer(total)
    place = {"rank": 0, "size": 1}
    if way == "together":
        plain = teachers = own.scored(indices, **place)
    else:
        plain, teachers = own.shares_apart(indices, **place)
    if way == "apart":
        plain = own.scored_apart(plain.exchange, **place)
    assert len(plain.token_ids_P) % total == 0 == len(teachers.token_ids_P) % total
    exchange, behind_P = plain.exchange, beginnings(teachers)
    contexts_R, arrival_R = {}, {}
    for group in exchange.groups:
        for at, row in enumerate(group.row_T.tolist()):
            contexts_R[row] = group.contexts
            arrival_R[row] = group.received_CT[:, at].tolist()
    if plain.shared is None:
        rows = list(range(len(plain.row_R)))
        slots = plain.slot_P[plain.row_R].tolist()
    else:
        assert (plain.target_P == IGNORED).all()
        rows, slots = plain.shared.number_F.tolist(), plain.shared.slot_F.tolist()
    found = dict(zip(slots, rows, strict=True))
    expected = 0
    for index in indices:
        views = own.views[index]
        slot = own.slots[own.places[index][0]]
        present = (0, *(c for c, view in enumerate(views.teachers, 1) if view is not None))
        for token in range(views.plain.num_response):
            row = found[slot + token]
            target = int(views.plain.token_ids_L[views.plain.num_prompt + token])
            assert int(plain.target_R[row]) == target
            if plain.shared is not None:
                position = int(plain.row_R[row])
                assert beginnings(plain)[position] == read_before(views, 0, token)
            assert contexts_R[row] == present
            for context, arrival in zip(present[1:], arrival_R[row], strict=True):
                position = int(exchange.sent_S[arrival])
                assert behind_P[position] == read_before(views, context, token)
            expected += 1
    assert len(found) == expected


def test_nothing_is_read_twice():
    together = packer().scored(tuple(range(6)), rank=0, size=1)
    # Beginnings of 8 1 5 6 9, of 8 8 1 2 5 6 9 behind their 8, of 3 5 6 9, and of 8 2 5.
    assert len(together.token_ids_P) == 5 + 6 + 4 + 2
    # Of 3 + 3 + 4 + 1 + 0 + 2 response tokens those that are the same in all contexts are one.
    assert len(together.row_R) == 3 + 4 + 1 + 2
    # Read behind evidence: 8 8 1 and 8 8 1 2 with up to three tokens more, and 3 with as many.
    assert len(together.exchange.sent_S) == 1 + 4 + 4


def test_the_plain_views_that_are_trained_lie_as_ever():
    views = rollouts()
    weights = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    shared = SharedViewPacker(views, weights=weights, padding=Padding())
    ever = ViewPacker(views, weights=weights, padding=Padding())
    place = {"rank": 0, "size": 1}
    (found, _), (expected, _) = (one.shares_apart((0, 2, 5), **place) for one in (shared, ever))
    for name in ("token_ids_P", "target_P", "mask_P", "slot_P", "weight_P", "advantage_P"):
        assert torch.equal(vars(found)[name], vars(expected)[name]), name


def test_a_micro_batch_holds_the_views_and_the_plain_tokens():
    plan = packer().plan(max_tokens=21, num_ranks=1, multiple_of=1)
    assert sorted(map(sorted, plan[0])) == [[0, 1, 2, 3, 4], [5]]
    (halves,) = packer().plan(max_tokens=15, num_ranks=1, multiple_of=1)
    assert sorted(index for bin_ in halves for index in bin_) == [0, 1, 2, 3, 4, 5]
    assert max(map(len, halves)) < 5
