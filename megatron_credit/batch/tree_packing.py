"""Rollouts laid end to end as micro-batches, each with all its answer probes behind it.

A rollout is a tree: its trunk, the tokens of prompt and response, and behind it the branches of
each state. A token sees the tokens it follows, and its position is their number. In a micro-batch
it takes up neighbouring positions like any sequence, so that all that is done token by token needs
to know nothing of it; attention does, by `Sight`.

Shape letters: P positions of a micro-batch on this context rank, L those of the whole micro-batch,
E scored edges, K tokens behind a state, S states.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from megatron_credit.batch.packing import (
    PackedBatch,
    Packer,
    Padding,
    context_positions,
    context_shard,
)
from megatron_credit.batch.probes import ProbedRollout, grow, untrained
from megatron_credit.batch.sight import Sight


@dataclass(frozen=True, kw_only=True)
class PackedTrees(PackedBatch):
    """One context rank's share of a micro-batch of trees; its targets are those of the edges.

    What a token sees of its own sequence is in three numbers, so that masks are made for one
    micro-batch at a time.
    """

    place_P: Tensor
    """Tokens of its sequence before it."""
    limit_P: Tensor
    """It sees so many, the first, of its sequence; and those at whose branch it is."""
    key_place_L: Tensor
    """`place_P` of all ranks' tokens; of each sequence one rank's after the other's."""
    key_end_L: Tensor
    """In the same order, the first place after those that follow the token, in its branches."""
    num_causal: tuple[int, ...]
    context_size: int
    row_E: Tensor
    """Positions here at which an edge's target is predicted; one predicts several."""
    edge_target_E: Tensor
    edge_slot_E: Tensor
    """Where its value belongs in the flat list of all edges."""

    def sight(self) -> Sight:
        """What its tokens see; made anew at each call."""
        lengths = self.boundaries_B1.diff().tolist()
        local_lengths = [length // self.context_size for length in lengths]
        parts = zip(
            self.num_causal,
            self.place_P.split(local_lengths),
            self.limit_P.split(local_lengths),
            self.key_place_L.split(lengths),
            self.key_end_L.split(lengths),
            strict=True,
        )
        return Sight(
            lengths=tuple(local_lengths),
            position_P=self.position_ids_P,
            num_causal=self.num_causal,
            masks=tuple(_mask(*part) for part in parts),
        )


def _mask(
    num_causal: int, place_P: Tensor, limit_P: Tensor, key_place_L: Tensor, key_end_L: Tensor
) -> Tensor | None:
    """[queries that are not plainly causal, keys] of one sequence."""
    if num_causal == len(place_P):
        return None
    place_P1, limit_P1 = place_P[num_causal:, None], limit_P[num_causal:, None]
    follows = (key_place_L <= place_P1) & (place_P1 < key_end_L)
    return (key_place_L < limit_P1) | follows


@dataclass(frozen=True, eq=False)
class _Tree:
    """One rollout's tokens, and its edges state by state."""

    token_ids_L: Tensor
    position_L: Tensor
    limit_L: Tensor
    end_L: Tensor
    num_trunk: int
    row_E: Tensor
    target_E: Tensor


class TreePacker(Packer):
    """Packs rollouts in which something is asked, each with all its probes."""

    def __init__(self, rollouts: Sequence[ProbedRollout], *, padding: Padding) -> None:
        self._trees = [_tree(rollout) for rollout in rollouts]
        sequences = [untrained(tree.token_ids_L, num_response=0) for tree in self._trees]
        super().__init__(sequences, weights=[0.0] * len(sequences), padding=padding)
        self.edges = list(accumulate((len(tree.row_E) for tree in self._trees), initial=0))
        """Where each rollout's first edge stands in the flat list of all; last, its length."""

    def share(self, indices: Sequence[int], *, rank: int, size: int) -> PackedTrees:
        """What context rank `rank` of `size` holds of the chosen rollouts as one micro-batch."""
        whole = self.pack(indices)
        placed = list(zip(indices, whole.boundaries_B1.tolist(), strict=False))
        place_L = whole.position_ids_P
        # As of padding, which sees itself alone: something is needed.
        position_L, limit_L, end_L = place_L.clone(), torch.zeros_like(place_L), place_L + 1
        for index, start in placed:
            tree = self._trees[index]
            within = slice(start, start + len(tree.token_ids_L))
            position_L[within], limit_L[within] = tree.position_L, tree.limit_L
            end_L[within] = tree.end_L
        key_L = _key_order(whole.boundaries_B1, size)
        row_E, target_E, slot_E = self._edges_at(placed, whole.boundaries_B1, rank, size)
        trunks = [self._trees[index].num_trunk for index in indices] or [0]
        trees = PackedTrees(
            **vars(replace(whole, position_ids_P=position_L)),
            place_P=place_L,
            limit_P=limit_L,
            key_place_L=place_L[key_L],
            key_end_L=end_L[key_L],
            # Context ranks hold the trunk in pieces.
            num_causal=tuple(trunks) if size == 1 else (0,) * len(trunks),
            context_size=size,
            row_E=row_E,
            edge_target_E=target_E,
            edge_slot_E=slot_E,
        )
        shard = context_shard(trees, rank=rank, size=size)
        assert isinstance(shard, PackedTrees)
        return shard

    def _edges_at(
        self, placed: Sequence[tuple[int, int]], boundaries_B1: Tensor, rank: int, size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(position on this rank, target, slot) of the edges of (rollout, start) that it holds."""
        none = torch.zeros(0, dtype=torch.int64)
        row_E = torch.cat([none, *(start + self._trees[index].row_E for index, start in placed)])
        target_E = torch.cat([none, *(self._trees[index].target_E for index, _ in placed)])
        slots = (torch.arange(*self.edges[index : index + 2]) for index, _ in placed)
        slot_E = torch.cat([none, *slots])
        held_P = context_positions(boundaries_B1, rank=rank, size=size)
        local_L = torch.full((int(boundaries_B1[-1]),), -1)
        local_L[held_P] = torch.arange(len(held_P))
        local_E = local_L[row_E]
        here_E = local_E >= 0
        return local_E[here_E], target_E[here_E], slot_E[here_E]


def _tree(rollout: ProbedRollout) -> _Tree:
    branches, num_trunk = grow(rollout.continuations), rollout.num_trunk
    num_branch = len(branches.token_ids)
    token_K, depth_K, end_K = (
        torch.tensor(values, dtype=torch.int64)
        for values in (branches.token_ids, branches.depths, branches.ends)
    )
    prefix_S1 = rollout.sequence.num_prompt + torch.tensor(rollout.states)[:, None]
    first_S1 = num_trunk + num_branch * torch.arange(len(prefix_S1))[:, None]
    parent_E, target_E = torch.tensor(branches.edges).T
    row_SE = torch.where(parent_E >= 0, first_S1 + parent_E, prefix_S1 - 1)
    trunk_L = torch.arange(num_trunk)
    return _Tree(
        token_ids_L=torch.cat(
            [rollout.sequence.token_ids_L[:num_trunk], token_K.repeat(len(prefix_S1))]
        ),
        position_L=torch.cat([trunk_L, (prefix_S1 + depth_K).flatten()]),
        limit_L=torch.cat([trunk_L + 1, prefix_S1.expand(-1, num_branch).flatten()]),
        end_L=torch.cat([trunk_L + 1, (first_S1 + end_K).flatten()]),
        num_trunk=num_trunk,
        row_E=row_SE.flatten(),
        target_E=target_E.repeat(len(prefix_S1)),
    )


def _key_order(boundaries_B1: Tensor, size: int) -> Tensor:
    """[L]: the positions of the micro-batch, of each sequence one context rank's after the
    other's."""
    bounds = zip(boundaries_B1[:-1].tolist(), boundaries_B1[1:].tolist(), strict=True)
    return torch.cat(
        [
            start + context_positions(torch.tensor([0, stop - start]), rank=rank, size=size)
            for start, stop in bounds
            for rank in range(size)
        ]
    )
