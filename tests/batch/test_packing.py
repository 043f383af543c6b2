"""Packing: values stand where their token is predicted, and context shards reassemble."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_credit.batch.packing import IGNORED, Packer, Padding, context_positions, context_shard
from megatron_credit.batch.sequence import TrainSequence


def make_sequence(num_prompt, num_response, first_token=1, **changes):
    """Tokens count up from `first_token`; value fields are their token's id plus a tag."""
    token_ids_L = torch.arange(first_token, first_token + num_prompt + num_response)
    response_T = token_ids_L[num_prompt:].float()
    values = {
        "token_ids_L": token_ids_L,
        "num_prompt": num_prompt,
        "mask_T": torch.ones(num_response, dtype=torch.bool),
        "rollout_logprob_T": response_T + 0.25,
        "advantage_T": response_T + 0.5,
        "old_logprob_T": None,
        "reference_logprob_T": None,
    }
    return TrainSequence(**(values | changes))


def test_known_example():
    sequences = [
        make_sequence(2, 2, 10),
        make_sequence(1, 2, 20, mask_T=torch.tensor([True, False])),
    ]
    packer = Packer(sequences, weights=[0.5, 2.0], padding=Padding(sequence=4, total=8))
    batch = packer.pack([1, 0])
    none = IGNORED
    assert batch.token_ids_P.tolist() == [20, 21, 22, 0, 10, 11, 12, 13]
    assert batch.position_ids_P.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert batch.target_P.tolist() == [21, 22, none, none, none, 12, 13, none]
    assert batch.mask_P.tolist() == [True, False, False, False, False, True, True, False]
    assert batch.slot_P.tolist() == [2, 3, -1, -1, -1, 0, 1, -1]
    assert batch.weight_P.tolist() == [2.0, 0, 0, 0, 0, 0.5, 0.5, 0]
    assert batch.advantage_P.tolist() == [21.5, 22.5, 0, 0, 0, 12.5, 13.5, 0]
    assert batch.rollout_logprob_P.tolist() == [21.25, 22.25, 0, 0, 0, 12.25, 13.25, 0]
    assert batch.old_logprob_P is None and batch.reference_logprob_P is None
    assert batch.boundaries_B1.tolist() == [0, 4, 8]
    assert batch.max_length == 4
    assert batch.row_R.tolist() == [0, 1, 5, 6]


def experts_of(token_ids_L):
    """Two layers and two experts a token, told apart by the token's id."""
    return torch.stack([token_ids_L, -token_ids_L], -1)[:, None].repeat(1, 2, 1).to(torch.int16)


def test_experts_stand_with_the_token_that_is_read():
    first, second = make_sequence(2, 2, 10), make_sequence(1, 2, 20)
    sequences = [
        replace(one, routed_experts_LDK=experts_of(one.token_ids_L)) for one in (first, second)
    ]
    padding = Padding.for_layout(tensor=1, context=2, sequence_parallel=False)
    batch = Packer(sequences, weights=[1.0, 1.0], padding=padding).pack([1, 0])
    assert batch.routed_experts_PDK[:, 1, 0].tolist() == [20, 21, 22, -1, 10, 11, 12, 13]
    assert batch.routed_experts_PDK[:, 0, 1].tolist() == [-20, -21, -22, -1, -10, -11, -12, -13]
    for rank in range(2):
        shard = context_shard(batch, rank=rank, size=2)
        real_P = shard.token_ids_P > 0
        expected_PDK = experts_of(shard.token_ids_P)
        assert shard.routed_experts_PDK[real_P].equal(expected_PDK[real_P])
    dummy = Packer(sequences, weights=[1.0, 1.0], padding=padding).pack([])
    assert (dummy.routed_experts_PDK == -1).all()
    with pytest.raises(ValueError, match="1 of 2 sequences have routed_experts_LDK"):
        Packer([first, sequences[1]], weights=[1.0, 1.0], padding=padding)


def test_total_padding_belongs_to_the_last_sequence():
    padding = Padding(sequence=1, total=4)
    batch = Packer([make_sequence(1, 4)], weights=[1.0], padding=padding).pack([0])
    assert batch.boundaries_B1.tolist() == [0, 8]
    assert batch.token_ids_P.tolist() == [1, 2, 3, 4, 5, 0, 0, 0]


def test_a_dummy_has_the_optional_fields_of_the_others_and_nothing_to_learn():
    sequence = make_sequence(1, 1, old_logprob_T=torch.tensor([-1.0]))
    dummy = Packer([sequence], weights=[1.0], padding=Padding(total=2, sequence=2)).pack([])
    assert dummy.token_ids_P.tolist() == [0, 0]
    assert dummy.target_P.tolist() == [IGNORED, IGNORED]
    assert not dummy.mask_P.any()
    assert dummy.old_logprob_P.tolist() == [0.0, 0.0]
    assert dummy.reference_logprob_P is None


responses = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=6)


@given(responses, st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]), st.booleans())
def test_every_value_meets_its_token_on_exactly_one_context_rank(shapes, context, tensor, sp):
    padding = Padding.for_layout(tensor=tensor, context=context, sequence_parallel=sp)
    sequences = [make_sequence(p, r, 100 * i + 1) for i, (p, r) in enumerate(shapes)]
    weights = [float(i + 1) for i in range(len(sequences))]
    packer = Packer(sequences, weights=weights, padding=padding)
    batch = packer.pack(range(len(sequences)))
    assert len(batch.token_ids_P) % (context * tensor if sp else context) == 0
    filled_T = torch.zeros(packer.slots[-1])
    for rank in range(context):
        shard = context_shard(batch, rank=rank, size=context)
        assert len(shard.token_ids_P) == len(batch.token_ids_P) // context
        for row in shard.row_R.tolist():
            token = int(shard.target_P[row])
            assert int(shard.token_ids_P[row]) == token - 1
            assert shard.advantage_P[row] == token + 0.5
            assert shard.weight_P[row] == token // 100 + 1
            filled_T[shard.slot_P[row]] += token
    response_T = torch.cat([s.token_ids_L[s.num_prompt :] for s in sequences])
    assert filled_T.tolist() == response_T.tolist()


def test_context_positions_zig_zag():
    boundaries_B1 = torch.tensor([0, 4, 12])
    first = context_positions(boundaries_B1, rank=0, size=2)
    second = context_positions(boundaries_B1, rank=1, size=2)
    assert first.tolist() == [0, 3, 4, 5, 10, 11]
    assert second.tolist() == [1, 2, 6, 7, 8, 9]


def test_plan_bound_holds_with_total_padding():
    sequences = [make_sequence(1, 4) for _ in range(4)]
    packer = Packer(sequences, weights=[1.0] * 4, padding=Padding(sequence=1, total=8))
    plan = packer.plan(max_tokens=15, num_ranks=1, multiple_of=1)
    assert [len(packer.pack(bin_).token_ids_P) for bin_ in plan[0]] == [8, 8, 8, 8]


def test_optional_fields_are_for_all_or_none():
    some = [make_sequence(1, 1), make_sequence(1, 1, old_logprob_T=torch.zeros(1))]
    with pytest.raises(ValueError, match="1 of 2 sequences have old_logprob_T"):
        Packer(some, weights=[1.0, 1.0], padding=Padding())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_prompt": 0}, "num_prompt=0 with 3 tokens"),
        ({"token_ids_L": torch.arange(3).int()}, "torch.int32; expected one dimension of int64"),
        ({"mask_T": torch.ones(2)}, r"mask_T has shape \(2,\) and type torch.float32"),
        ({"advantage_T": torch.zeros(3)}, r"advantage_T has shape \(3,\)"),
        ({"old_logprob_T": torch.zeros(1)}, r"old_logprob_T has shape \(1,\)"),
        ({"routed_experts_LDK": torch.zeros(3, 2, 2)}, "torch.float32; expected 3 tokens"),
        (
            {"routed_experts_LDK": torch.zeros(2, 2, 2, dtype=torch.int16)},
            r"routed_experts_LDK has shape \(2, 2, 2\)",
        ),
    ],
)
def test_a_sequence_whose_fields_do_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(make_sequence(1, 2), **changes)
