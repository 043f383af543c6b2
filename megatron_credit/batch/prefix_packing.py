"""Sequences of a micro-batch laid out so that what some of them begin with alike is there once.

The rollouts of a group share their prompt, a teacher's contexts of them share the evidence, and
responses go the same way for a while. In lexicographic order each sequence adds the tokens behind
what it shares with the one before it; they see the positions of the shared part too, wherever those
are. That needs an attention that can look there, and a forward pass without a gradient of its own.

Shape letters: P positions of the micro-batch, L tokens of one sequence, F response tokens of all
its rollouts, R those of them that differ in what is read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_credit.batch.plan import Bin, plan_microbatches
from megatron_credit.batch.sight import Sight

LEAST_PIECES = 4
"""Of a data rank, so that families can be dealt evenly."""


@dataclass(frozen=True, eq=False)
class Prefixes:
    """Where the tokens of some sequences are, each different beginning once."""

    token_ids_P: Tensor
    depth_P: Tensor
    """Tokens of its sequence before it."""
    lengths: tuple[int, ...]
    """Tokens that each sequence adds which adds any, one behind the other."""
    before: tuple[Tensor | None, ...]
    """Of each of these, the positions of what it shares with earlier ones; None: nothing."""
    paths: tuple[Tensor, ...]
    """Of each sequence in the order given, the positions of its tokens."""

    @classmethod
    def of(cls, sequences: Sequence[Tensor], *, multiple_of: int) -> "Prefixes":
        """Of these token ids, filled up with padding, which is alone and at least there."""
        paths: list[Tensor] = [torch.zeros(0, dtype=torch.int64)] * len(sequences)
        tokens, depths, lengths, before = list[Tensor](), list[Tensor](), list[int](), []
        path_L, end = torch.zeros(0, dtype=torch.int64), 0
        for index, shared in _in_order(sequences):
            added = len(sequences[index]) - shared
            shared_path = path_L[:shared]
            path_L = torch.cat([shared_path, torch.arange(end, end + added)])
            paths[index] = path_L
            if added:
                tokens.append(sequences[index][shared:])
                depths.append(torch.arange(shared, shared + added))
                lengths.append(added)
                before.append(shared_path if shared else None)
                end += added
        padding = -end % multiple_of if end else multiple_of
        if padding:
            tokens.append(torch.zeros(padding, dtype=torch.int64))
            depths.append(torch.arange(padding))
            lengths.append(padding)
            before.append(None)
        return cls(
            torch.cat(tokens), torch.cat(depths), tuple(lengths), tuple(before), tuple(paths)
        )


def count_prefixes(sequences: Sequence[Tensor]) -> int:
    """Positions that these sequences take so, without padding."""
    return sum(len(sequences[index]) - shared for index, shared in _in_order(sequences))


def _in_order(sequences: Sequence[Tensor]) -> list[tuple[int, int]]:
    """The numbers of the sequences in lexicographic order, and how many tokens each shares with
    the one before it."""
    ids = [sequence.numpy() for sequence in sequences]
    # Big-endian bytes compare as the numbers do.
    keys = [one.astype(">i8").tobytes() for one in ids]
    order = sorted(range(len(ids)), key=keys.__getitem__)
    neighbours = zip(order[:1] + order, order, strict=False)
    shared = [_num_shared(ids[one], ids[other]) for one, other in neighbours]
    return list(zip(order, [0, *shared[1:]], strict=True)) if order else []


def _num_shared(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens both begin with."""
    least = min(len(one), len(other))
    differs = np.flatnonzero(one[:least] != other[:least])
    return int(differs[0]) if len(differs) else least


@dataclass(frozen=True, eq=False)
class SharedRows:
    """How a micro-batch of shared prefixes is seen and read: in place of what `PackedBatch` says of
    targets, of which a position may have several."""

    lengths: tuple[int, ...]
    depth_P: Tensor
    before: tuple[Tensor | None, ...]
    """These three as in `Prefixes`."""
    row_R: Tensor
    """Positions at which something is read."""
    target_R: Tensor
    """The token that is predicted there."""
    slot_F: Tensor
    """Of each response token, where its value belongs in the flat list of all."""
    number_F: Tensor
    """Of each response token, which row it is."""

    def on(self, device: torch.device) -> "SharedRows":
        """The same with its tensors on `device`."""
        return SharedRows(
            self.lengths,
            self.depth_P.to(device),
            tuple(None if one is None else one.to(device) for one in self.before),
            *(one.to(device) for one in (self.row_R, self.target_R, self.slot_F, self.number_F)),
        )

    def sight(self) -> Sight:
        """What its tokens see; made anew at each call."""
        pairs = list(zip(self.lengths, self.before, strict=True))
        masks = (None if one is None else _behind(len(one), length) for length, one in pairs)
        device = self.depth_P.device
        return Sight(
            lengths=self.lengths,
            position_P=self.depth_P,
            num_causal=tuple(length if one is None else 0 for length, one in pairs),
            masks=tuple(None if mask is None else mask.to(device) for mask in masks),
            before=self.before,
        )


def _behind(num_before: int, length: int) -> Tensor:
    """[queries, keys] of tokens that see all that is before them, and each other causally."""
    return torch.ones(length, num_before + length, dtype=torch.bool).tril(num_before)


def distinct_rows(*numbers: Tensor) -> tuple[Tensor, Tensor]:
    """(first_R, number_F): where each different tuple of these [F] integers >= -1 stands in one
    place, and for all places which of them it is."""
    number_F = torch.zeros_like(numbers[0])
    for value_F in numbers:
        key_F = number_F * (int(value_F.max()) + 2 if len(value_F) else 1) + value_F + 1
        number_F = key_F.unique(return_inverse=True)[1]
    first_R = torch.empty(int(number_F.max()) + 1 if len(number_F) else 0, dtype=torch.int64)
    # Any of them will do, but the same one each time: the last of those written is not defined.
    backwards_F = torch.arange(len(number_F)).flip(0)
    first_R.scatter_reduce_(0, number_F.flip(0), backwards_F, "amin", include_self=False)
    return first_R, number_F


def plan_families(
    prompts: Sequence[Tensor],
    length_of: Callable[[Sequence[int]], int],
    *,
    max_tokens: int,
    num_ranks: int,
    multiple_of: int,
) -> list[list[Bin]]:
    """`plan_microbatches` of sequences with these prompts, those with the same one together.

    `length_of` says how many positions some of them take in a micro-batch. Where they do not fit,
    or would be too large a share of a data rank's work to be dealt evenly, they are halved.
    """
    families: dict[bytes, list[int]] = {}
    for index, prompt_L in enumerate(prompts):
        families.setdefault(prompt_L.numpy().tobytes(), []).append(index)
    bound = max_tokens
    if num_ranks > 1:
        total = sum(map(length_of, families.values()))
        bound = min(bound, max(1, total // (LEAST_PIECES * num_ranks)))
    cut = [_cut(members, length_of, bound) for members in families.values()]
    pieces = [piece for parts in cut for piece in parts]
    plan = plan_microbatches(
        [length for _, length in pieces],
        max_tokens=max_tokens,
        num_ranks=num_ranks,
        multiple_of=multiple_of,
    )
    return [
        [tuple(sorted(index for number in bin_ for index in pieces[number][0])) for bin_ in bins]
        for bins in plan
    ]


def _cut(
    members: list[int], length_of: Callable[[Sequence[int]], int], bound: int
) -> list[tuple[list[int], int]]:
    """The members with their length, halved until it is within the bound or there is one alone."""
    length = length_of(members)
    if len(members) == 1 or length <= bound:
        return [(members, length)]
    half = len(members) // 2
    return [
        piece for part in (members[:half], members[half:]) for piece in _cut(part, length_of, bound)
    ]
