"""Views of one response: what they must share, and where packing puts the rows of each token."""

import pytest
import torch

from megatron_credit.batch.packing import IGNORED, Packer, Padding, context_positions
from megatron_credit.batch.sequence import TrainSequence
from megatron_credit.batch.view_packing import ViewPacker
from megatron_credit.batch.views import View, Views, count_contexts

ONE = Padding()


def make_sequence(prompt, response, **fields):
    values_T = torch.arange(len(response), dtype=torch.float32)
    known = {"old_logprob_T": None, "reference_logprob_T": None}
    return TrainSequence(
        token_ids_L=torch.tensor([*prompt, *response]),
        num_prompt=len(prompt),
        mask_T=values_T >= 0,
        rollout_logprob_T=values_T,
        advantage_T=values_T,
        **known | fields,
    )


def make_views(number, num_prompt, num_response, lengths):
    """Response token t of rollout n is 100 n + t; a view's prompt is of -(10 n + context)."""
    response = [100 * number + t for t in range(num_response)]
    plain = make_sequence([-10 * number] * num_prompt, response)
    prompts = [
        None if length is None else torch.full((length,), -(10 * number + context))
        for context, length in enumerate(lengths, start=1)
    ]
    return Views.behind(plain, prompts)


def rollouts():
    return [
        make_views(1, 3, 5, (2, 9)),
        make_views(2, 1, 0, (4, 4)),
        make_views(3, 6, 7, (None, 1)),
        make_views(4, 2, 1, (None, None)),
        make_views(5, 2, 6, (8, 3)),
    ]


def test_views_share_the_ids_of_the_response():
    views = make_views(1, 2, 3, (1, None))
    assert views.num_contexts == 3
    assert views.teachers[0].token_ids_L.tolist() == [-11, 100, 101, 102]
    assert views.teachers[1] is None


@pytest.mark.parametrize(
    ("token_ids", "num_prompt", "message"),
    [
        ([7, 7, 5, 9], 2, "context 1: response token 1 is 9, in the plain view it is 6"),
        ([7, 5], 1, "context 1: 2 tokens with num_prompt=1; expected at least one token of a"),
        ([5, 6], 0, "with num_prompt=0; expected at least one token of a prompt, then the 2"),
        ([7.0, 5.0, 6.0], 1, "has shape (3,) and type torch.float32; expected one dimension"),
    ],
)
def test_views_that_do_not_fit_are_refused(token_ids, num_prompt, message):
    view = View(token_ids_L=torch.tensor(token_ids), num_prompt=num_prompt)
    with pytest.raises(ValueError) as caught:
        Views(plain=make_sequence([1], [5, 6]), teachers=(view,))
    assert message in str(caught.value)


def test_rollouts_have_the_same_contexts():
    assert count_contexts([]) == 1
    assert count_contexts(rollouts()) == 3
    with pytest.raises(ValueError, match="rollout 1 has 2 contexts and rollout 0 has 3"):
        count_contexts([make_views(1, 1, 1, (1, 1)), make_views(2, 1, 1, (1,))])


def test_absent_views_and_those_of_nothing_take_no_room():
    packer = ViewPacker(rollouts(), weights=[1.0] * 5, padding=ONE)
    assert packer.lengths_N() == [8 + 7 + 14, 1, 13 + 8, 3, 8 + 14 + 9]
    assert len(packer.share([0, 2], rank=0, size=1).token_ids_P) == 29 + 21
    plan = packer.plan(max_tokens=40, num_ranks=1, multiple_of=1)
    # 85 tokens in three; no rollout is torn apart.
    assert sorted(index for bin_ in plan[0] for index in bin_) == [0, 1, 2, 3, 4]
    assert sorted(sum(packer.lengths_N()[i] for i in bin_) for bin_ in plan[0]) == [25, 29, 31]


def test_only_plain_views_have_targets():
    """The rest of the micro-batch is that of the plain sequences."""
    views = rollouts()
    weights = [0.1, 0.2, 0.3, 0.4, 0.5]
    batch = ViewPacker(views, weights=weights, padding=ONE).share([0, 2, 4], rank=0, size=1)
    plain = Packer([one.plain for one in views], weights=weights, padding=ONE).pack([0, 2, 4])
    for name in ("target_P", "mask_P", "slot_P", "weight_P", "advantage_P", "rollout_logprob_P"):
        found_R, expected_R = (vars(one)[name][one.row_R] for one in (batch, plain))
        assert torch.equal(found_R, expected_R), name
    assert batch.mask_P.sum() == 18 and batch.weight_P[batch.target_P == IGNORED].eq(0).all()


def test_what_the_plain_sequence_has_the_others_lack():
    experts_LDK = torch.ones(4, 2, 1, dtype=torch.int16)
    half_T = torch.full((2,), 0.5)
    plain = make_sequence([3, 3], [4, 5], old_logprob_T=half_T, routed_experts_LDK=experts_LDK)
    views = Views.behind(plain, [torch.tensor([6])])
    batch = ViewPacker([views], weights=[1.0], padding=ONE).share([0], rank=0, size=1)
    assert batch.old_logprob_P.tolist() == [0, 0.5, 0.5, 0, 0, 0, 0]
    assert batch.routed_experts_PDK[:, 0, 0].tolist() == [1, 1, 1, 1, -1, -1, -1]
    assert batch.reference_logprob_P is None


@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("indices", [(0, 1, 2, 3, 4), (2, 3), (3,), ()], ids=str)
def test_each_token_finds_its_row_in_every_view(indices, size, apart):
    """The rows that travel are here their own tokens: prompt, and what comes next."""
    padding = Padding.for_layout(tensor=2, context=size, sequence_parallel=size > 1)
    packer = ViewPacker(rollouts(), weights=[1.0] * 5, padding=padding)
    places = [{"rank": rank, "size": size} for rank in range(size)]
    if apart:
        pairs = [packer.shares_apart(indices, **place) for place in places]
        whole = packer.pack([place for i in indices for place in packer.places[i][1:]])
    else:
        pairs = [(share, share) for share in (packer.share(indices, **p) for p in places)]
        whole = packer.pack([place for i in indices for place in packer.places[i]])
    content = list(map(tuple, contents(whole).tolist()))
    sent = []
    for place, (_, teachers) in zip(places, pairs, strict=True):
        position_S = context_positions(whole.boundaries_B1, **place)[teachers.exchange.sent_S]
        sent.append(position_S.split(list(teachers.exchange.sent_sizes)))
    found = []
    for rank, (plain, _) in enumerate(pairs):
        exchange = plain.exchange
        received = [parts[rank] for parts in sent]
        assert tuple(map(len, received)) == exchange.received_sizes
        received_S = torch.cat(received)
        target_R = plain.target_P[plain.row_R]
        for group in exchange.groups:
            for row, *arrivals in zip(group.row_T, *group.received_CT, strict=True):
                target = int(target_R[row])
                for context, place in zip(group.contexts[1:], arrivals, strict=True):
                    prompt = -(10 * (target // 100) + context)
                    assert content[int(received_S[place])] == (prompt, target)
                found.append((target, group.contexts))
    expected = [
        (int(token), (0, *(c for c, v in enumerate(one.teachers, 1) if v is not None)))
        for one in (rollouts()[index] for index in indices)
        for token in one.plain.token_ids_L[one.plain.num_prompt :]
    ]
    assert sorted(found) == sorted(expected)


def contents(whole):
    """[P, 2]: the first token of each position's sequence, and the token behind the position."""
    first_P = torch.cat(
        [
            whole.token_ids_P[start].expand(stop - start)
            for start, stop in whole.boundaries_B1.unfold(0, 2, 1).tolist()
        ]
    )
    return torch.stack([first_P, whole.token_ids_P.roll(-1)], 1)
