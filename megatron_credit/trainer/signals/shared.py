"""Numbers of the rank that sampled, for all ranks: one row of integers or floats a rollout."""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def padded(rows: Sequence[Sequence[int]], fill: int) -> Tensor:
    """[rows, longest] int64, filled up on the right."""
    tensors = [torch.tensor(list(row), dtype=torch.int64) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=fill)


def padded_floats(rows: Sequence[Sequence[float]]) -> Tensor:
    """[rows, longest] float64, filled up with NaN on the right."""
    tensors = [torch.tensor(list(row), dtype=torch.float64) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=torch.nan)


def distinct(keys: Sequence[Hashable]) -> tuple[list[int], list[int]]:
    """Where each different key stands first, and for every key which of those it equals.

    Rollouts of a group are often the same, and what is the same is read once.
    """
    number: dict[Hashable, int] = {}
    place = [number.setdefault(key, len(number)) for key in keys]
    first = [place.index(each) for each in range(len(number))]
    return first, place


def ids_of(tokens: Tensor, num_prompt: int) -> Hashable:
    """A key that two sequences share if their tokens do."""
    return num_prompt, tokens.numpy().tobytes()


def spans_of(ids: Sequence[int]) -> list[tuple[int, int]]:
    """Where each run of one id >= 0 starts and ends, in order."""
    spans, start = [], 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or ids[end] != ids[start]:
            if ids[start] >= 0:
                spans.append((start, end))
            start = end
    return spans
