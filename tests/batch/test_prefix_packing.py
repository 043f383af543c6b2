"""What sequences begin with alike is there once, and each token sees what it follows."""

import random

import pytest
import torch

from megatron_credit.batch.prefix_packing import (
    Prefixes,
    SharedRows,
    count_prefixes,
    distinct_rows,
    plan_families,
)

SEQUENCES = {
    "literal": [[1, 2, 3, 4], [1, 2, 5], [9], [1, 2, 3, 4], [1, 2]],
    "alike": [[7, 7, 7]] * 3,
    "apart": [[3, 1], [2, 1], [1, 1]],
    "nothing": [],
    # Bytes of large and of small ids must not be mixed up in their order.
    "large": [[256, 1], [1, 256], [1, 255], [70_000], [70_000, 3]],
}


def tensors(sequences):
    return [torch.tensor(one, dtype=torch.int64) for one in sequences]


def drawn(seed):
    """Sequences of a small alphabet, which begin alike in many ways."""
    rng = random.Random(seed)
    return [[rng.randrange(3) for _ in range(rng.randrange(1, 9))] for _ in range(12)]


EVERY = [*SEQUENCES.values(), *map(drawn, range(5))]


@pytest.mark.parametrize("sequences", EVERY, ids=lambda one: str(len(one)))
@pytest.mark.parametrize("multiple_of", [1, 4])
def test_each_beginning_is_there_once(sequences, multiple_of):
    found = Prefixes.of(tensors(sequences), multiple_of=multiple_of)
    beginnings = {tuple(one[:end]) for one in sequences for end in range(1, len(one) + 1)}
    assert count_prefixes(tensors(sequences)) == len(beginnings)
    padded = max(-(-len(beginnings) // multiple_of), 1) * multiple_of
    assert len(found.token_ids_P) == len(found.depth_P) == sum(found.lengths) == padded
    for one, path_L in zip(sequences, found.paths, strict=True):
        assert found.token_ids_P[path_L].tolist() == one
        assert found.depth_P[path_L].tolist() == list(range(len(one)))
    read = {position for path_L in found.paths for position in path_L.tolist()}
    assert len(read) == len(beginnings)


@pytest.mark.parametrize("sequences", EVERY, ids=lambda one: str(len(one)))
def test_each_token_sees_what_it_follows(sequences):
    found = Prefixes.of(tensors(sequences), multiple_of=4)
    nothing = torch.zeros(0, dtype=torch.int64)
    rows = SharedRows(found.lengths, found.depth_P, found.before, *(nothing,) * 4)
    sight, seen, start = rows.sight(), {}, 0
    for length, causal, mask, before in zip(
        sight.lengths, sight.num_causal, sight.masks, sight.before, strict=True
    ):
        own = list(range(start, start + length))
        keys = torch.tensor([*([] if before is None else before.tolist()), *own])
        for at in range(length):
            plain = before is None and at < causal
            seen[start + at] = keys[: at + 1].tolist() if plain else keys[mask[at]].tolist()
        start += length
    for path_L in found.paths:
        path = path_L.tolist()
        for depth, position in enumerate(path):
            assert seen[position] == path[: depth + 1]


def test_different_rows_are_told_apart():
    first_R, number_F = distinct_rows(
        torch.tensor([5, 5, 0, 5, 0, 5]),
        torch.tensor([1, 2, 1, 1, 1, 1]),
        torch.tensor([-1, -1, 3, 0, 3, -1]),
    )
    # (0, 1, 3), (5, 1, -1), (5, 1, 0) and (5, 2, -1), each where it is first.
    assert sorted(first_R.tolist()) == [0, 1, 2, 3]
    assert [first_R[number] for number in number_F] == [0, 1, 2, 3, 2, 0]
    nothing_F = torch.zeros(0, dtype=torch.int64)
    assert [len(one) for one in distinct_rows(nothing_F, nothing_F)] == [0, 0]


def planned(prompts, max_tokens, num_ranks=1):
    def length_of(members):
        return 10 + len(members)

    plan = plan_families(
        tensors(prompts), length_of, max_tokens=max_tokens, num_ranks=num_ranks, multiple_of=1
    )
    return [[set(bin_) for bin_ in bins] for bins in plan]


PROMPTS = [[1], [2], [1], [2], [1], [1]]


def test_rollouts_of_a_prompt_stay_together():
    assert planned(PROMPTS, 26) == [[{0, 1, 2, 3, 4, 5}]]
    assert sorted(map(sorted, planned(PROMPTS, 15)[0])) == [[0, 2, 4, 5], [1, 3]]


def test_what_does_not_fit_is_halved():
    assert sorted(map(sorted, planned(PROMPTS, 12)[0])) == [[0, 2], [1, 3], [4, 5]]
    # Nothing is cut below a rollout.
    assert sorted(map(sorted, planned([[1]] * 3, 5)[0])) == [[0], [1], [2]]


def test_a_prompt_that_is_most_of_the_work_is_dealt_to_all_ranks():
    plan = planned([[1]] * 8, 100, num_ranks=2)
    assert sorted(len(set().union(*bins)) for bins in plan) == [4, 4]
