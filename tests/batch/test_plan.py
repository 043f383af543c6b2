"""The micro-batch plan: nothing lost, nothing cut, the bound kept, ranks in step and balanced."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_credit.batch.plan import plan_microbatches

lengths = st.lists(st.integers(1, 60), max_size=40)


@given(lengths, st.integers(1, 100), st.integers(1, 4), st.integers(1, 3))
def test_every_sequence_once_under_the_bound(lengths_N, max_tokens, num_ranks, multiple_of):
    plan = plan_microbatches(
        lengths_N, max_tokens=max_tokens, num_ranks=num_ranks, multiple_of=multiple_of
    )
    assert len(plan) == num_ranks
    counts = {len(bins) for bins in plan}
    assert len(counts) == 1 and counts.pop() % multiple_of == 0
    members = [index for bins in plan for members in bins for index in members]
    assert sorted(members) == list(range(len(lengths_N)))
    for bins in plan:
        for members in bins:
            assert len(members) == 1 or sum(lengths_N[i] for i in members) <= max_tokens


@given(lengths, st.integers(60, 200), st.integers(1, 4))
def test_ranks_differ_by_at_most_one_longest_sequence(lengths_N, max_tokens, num_ranks):
    plan = plan_microbatches(lengths_N, max_tokens=max_tokens, num_ranks=num_ranks)
    bins = [sum(lengths_N[i] for i in members) for bins in plan for members in bins]
    longest = max(lengths_N, default=0)
    assert max(bins) - min(bins) <= longest
    tokens = [sum(lengths_N[i] for members in bins for i in members) for bins in plan]
    assert max(tokens) - min(tokens) <= longest


def test_longest_first_packs_the_known_example():
    plan = plan_microbatches([3, 7, 5, 4, 1], max_tokens=10, num_ranks=1)
    assert plan == [[(0, 1), (2, 3, 4)]]


def test_a_sequence_above_the_bound_is_alone_and_whole():
    plan = plan_microbatches([50, 2, 2, 2], max_tokens=6, num_ranks=1)
    assert plan == [[(0,), (1, 2, 3)]]


def test_fewer_sequences_than_ranks_leaves_dummies():
    assert plan_microbatches([4, 6], max_tokens=8, num_ranks=3) == [[(1,)], [(0,)], [()]]
    assert plan_microbatches([], max_tokens=8, num_ranks=2, multiple_of=2) == [[(), ()], [(), ()]]


def test_many_equal_sequences_fill_micro_batches_evenly():
    plan = plan_microbatches([45] * 192, max_tokens=1024, num_ranks=2)
    assert [[len(members) for members in bins] for bins in plan] == [[20, 19, 19, 19, 19]] * 2


@pytest.mark.parametrize("name", ["max_tokens", "num_ranks", "multiple_of"])
def test_sizes_must_be_positive(name):
    sizes = {"max_tokens": 8, "num_ranks": 1, "multiple_of": 1} | {name: 0}
    with pytest.raises(ValueError, match=f"{name}=0"):
        plan_microbatches([1], **sizes)
