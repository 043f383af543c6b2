"""Several views of each rollout in one micro-batch, and which rows of it belong together.

The plain view is packed as ever, with its targets. The other views are packed behind it without
any: for each plain row, the position that precedes its target, there is one position in each view
that precedes the same token.

Under context parallelism those positions lie on different ranks. Rows of the other views go to the
rank that holds the plain row, so that no token is computed twice, plain rows never travel, and
their gradient needs no communication.

Shape letters: P positions of a micro-batch, C contexts (the plain one, 0, left out where a name
says teacher), R plain rows on this rank, T those of a group, S rows of teachers that are sent.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_credit.batch.packing import (
    IGNORED,
    PackedBatch,
    Packer,
    Padding,
    TokenWeight,
    context_positions,
    context_shard,
)
from megatron_credit.batch.sequence import TrainSequence
from megatron_credit.batch.views import View, Views, count_contexts


@dataclass(frozen=True, eq=False)
class RowGroup:
    """Plain rows of this rank that have the same contexts."""

    contexts: tuple[int, ...]
    """Ascending; the first is 0."""
    row_T: Tensor
    """Their places among the rank's plain rows, `PackedBatch.row_R`."""
    received_CT: Tensor
    """For each context but the first, the places of its rows among those that arrive here."""

    def on(self, device: torch.device) -> "RowGroup":
        """The same group with its tensors on `device`."""
        return RowGroup(self.contexts, self.row_T.to(device), self.received_CT.to(device))


@dataclass(frozen=True, eq=False)
class Exchange:
    """How the teachers' rows come to their plain rows, as one context rank sees it."""

    rollouts: tuple[int, ...]
    """Those of the micro-batch."""
    sent_S: Tensor
    """Positions here of rows that are needed, ordered by the context rank that needs them."""
    sent_sizes: tuple[int, ...]
    """How many of them go to each context rank, this one included."""
    received_sizes: tuple[int, ...]
    """How many come from each."""
    groups: tuple[RowGroup, ...]
    """Every plain row is in one."""

    def on(self, device: torch.device) -> "Exchange":
        """The same exchange with its tensors on `device`."""
        groups = tuple(group.on(device) for group in self.groups)
        return replace(self, sent_S=self.sent_S.to(device), groups=groups)


@dataclass(frozen=True, eq=False)
class TeacherRows:
    """What a pass of its own over the teachers' views has found for a micro-batch."""

    received_SH: Tensor
    weight_VH: Tensor
    """Output weight of the model that read them, this rank's part."""


@dataclass(frozen=True, kw_only=True)
class PackedViews(PackedBatch):
    """One context rank's share of a micro-batch of views; only plain views have targets."""

    exchange: Exchange
    teacher_rows: TeacherRows | None = None
    """None: the teachers' views are in this micro-batch too."""

    def on(self, device: torch.device) -> "PackedViews":
        """The same micro-batch with its tensors on `device`."""
        moved = super().on(device)
        assert isinstance(moved, PackedViews)
        return replace(moved, exchange=self.exchange.on(device))


class ViewPacker(Packer):
    """Packs rollouts with all their views; absent views take no room."""

    def __init__(
        self, views: Sequence[Views], *, weights: Sequence[TokenWeight], padding: Padding
    ) -> None:
        """`weights` is the loss weight of each rollout's trained tokens.

        ValueError for rollouts that differ in the number of their contexts.
        """
        self.views = views
        self.num_contexts = count_contexts(views)
        self.places: list[list[int]] = []
        """Of each rollout, where its sequences stand in the list of all; the plain one first."""
        sequences: list[TrainSequence] = []
        flat_weights: list[TokenWeight] = []
        for one, weight in zip(views, weights, strict=True):
            added = [one.plain, *(_bare(view, one.plain) for _, view in present_views(one))]
            self.places.append(list(range(len(sequences), len(sequences) + len(added))))
            sequences += added
            flat_weights += [weight] + [0.0] * (len(added) - 1)
        super().__init__(sequences, weights=flat_weights, padding=padding)

    def lengths_N(self) -> list[int]:
        """Positions that each rollout takes in a micro-batch, all its views together."""
        lengths = super().lengths_N()
        return [sum(lengths[place] for place in places) for places in self.places]

    def share(self, indices: Sequence[int], *, rank: int, size: int) -> PackedViews:
        """What context rank `rank` of `size` holds of the chosen rollouts as one micro-batch."""
        whole = self.pack([place for index in indices for place in self.places[index]])
        starts = iter(whole.boundaries_B1.tolist())
        position_CP = self._teacher_positions(indices, whole, starts, starts)
        exchange = _exchange(indices, position_CP, (whole, whole), rank=rank, size=size)
        return _shard(whole, exchange, rank=rank, size=size)

    def shares_apart(
        self, indices: Sequence[int], *, rank: int, size: int
    ) -> tuple[PackedViews, PackedViews]:
        """The same with the plain views in one micro-batch and the teachers' in another."""
        plain = self.pack([self.places[index][0] for index in indices])
        teachers = self.pack([place for index in indices for place in self.places[index][1:]])
        starts = (iter(batch.boundaries_B1.tolist()) for batch in (plain, teachers))
        position_CP = self._teacher_positions(indices, plain, *starts)
        exchange = _exchange(indices, position_CP, (plain, teachers), rank=rank, size=size)
        return (
            _shard(plain, exchange, rank=rank, size=size),
            _shard(teachers, exchange, rank=rank, size=size),
        )

    def scored(self, indices: Sequence[int], *, rank: int, size: int) -> PackedViews:
        """What `share` gives, of which nothing is trained."""
        return self.share(indices, rank=rank, size=size)

    def trained_apart(self, exchange: Exchange, *, rank: int, size: int) -> PackedViews:
        """The first of what `shares_apart` gives, from its exchange."""
        plain = self.pack([self.places[index][0] for index in exchange.rollouts])
        return _shard(plain, exchange, rank=rank, size=size)

    def scored_apart(self, exchange: Exchange, *, rank: int, size: int) -> PackedViews:
        """The same, of which nothing is trained."""
        return self.trained_apart(exchange, rank=rank, size=size)

    def _teacher_positions(
        self,
        indices: Sequence[int],
        plain: PackedBatch,
        plain_starts: Iterator[int],
        teacher_starts: Iterator[int],
    ) -> Tensor:
        """[C - 1, P]: where a teacher's view has the row for the token of a plain row, or -1."""
        position_CP = torch.full((self.num_contexts - 1, len(plain.target_P)), -1)
        for index in indices:
            one = self.views[index]
            response_T = torch.arange(one.plain.num_response)
            plain_T = next(plain_starts) + one.plain.num_prompt - 1 + response_T
            for teacher, view in present_views(one):
                first = next(teacher_starts) + view.num_prompt - 1
                position_CP[teacher, plain_T] = first + response_T
        return position_CP


def present_views(views: Views) -> Iterator[tuple[int, View]]:
    """The teachers' numbers and views, where there is a response to be read."""
    for number, view in enumerate(views.teachers):
        if view is not None and views.plain.num_response:
            yield number, view


def _bare(view: View, plain: TrainSequence) -> TrainSequence:
    """The view as a sequence without targets, with the fields that the plain one has."""
    experts_LDK = plain.routed_experts_LDK
    if experts_LDK is not None:
        # The engine never saw this context: the router decides.
        experts_LDK = experts_LDK.new_full((len(view.token_ids_L), *experts_LDK.shape[1:]), -1)
    old_T, reference_T = plain.old_logprob_T, plain.reference_logprob_T
    return TrainSequence(
        token_ids_L=view.token_ids_L,
        num_prompt=len(view.token_ids_L),
        mask_T=plain.mask_T[:0],
        rollout_logprob_T=plain.rollout_logprob_T[:0],
        advantage_T=plain.advantage_T[:0],
        old_logprob_T=None if old_T is None else old_T[:0],
        reference_logprob_T=None if reference_T is None else reference_T[:0],
        routed_experts_LDK=experts_LDK,
    )


def _shard(whole: PackedBatch, exchange: Exchange, *, rank: int, size: int) -> PackedViews:
    return PackedViews(**vars(context_shard(whole, rank=rank, size=size)), exchange=exchange)


def _exchange(
    indices: Sequence[int],
    position_CP: Tensor,
    batches: tuple[PackedBatch, PackedBatch],
    *,
    rank: int,
    size: int,
) -> Exchange:
    """What rank `rank` sends and gets; `position_CP` leads from plain rows to the teachers'."""
    plain, teachers = batches
    wanted = [
        position_CP[:, held_P[plain.target_P[held_P] != IGNORED]] for held_P in _held(plain, size)
    ]
    listed = [position_CR[position_CR >= 0] for position_CR in wanted]
    holder_P, local_P = torch.empty_like(teachers.target_P), torch.empty_like(teachers.target_P)
    for holder, held_P in enumerate(_held(teachers, size)):
        holder_P[held_P] = holder
        local_P[held_P] = torch.arange(len(held_P))
    sent = [local_P[position_S[holder_P[position_S] == rank]] for position_S in listed]
    source_S = holder_P[listed[rank]]
    # Rows arrive rank by rank, and each rank's in the order of the list.
    arrival_S = torch.empty_like(source_S)
    arrival_S[source_S.argsort(stable=True)] = torch.arange(len(source_S))
    received_CR = torch.full_like(wanted[rank], -1)
    received_CR[wanted[rank] >= 0] = arrival_S
    return Exchange(
        rollouts=tuple(indices),
        sent_S=torch.cat(sent),
        sent_sizes=tuple(len(local_S) for local_S in sent),
        received_sizes=tuple(source_S.bincount(minlength=size).tolist()),
        groups=tuple(row_groups(received_CR)),
    )


def _held(whole: PackedBatch, size: int) -> list[Tensor]:
    """The positions that each context rank holds, in its order."""
    return [context_positions(whole.boundaries_B1, rank=rank, size=size) for rank in range(size)]


def row_groups(received_CR: Tensor) -> Iterator[RowGroup]:
    """One group for each set of contexts that occurs."""
    present_CR = received_CR >= 0
    bit_C1 = 2 ** torch.arange(len(present_CR))[:, None]
    pattern_R = (present_CR * bit_C1).sum(0)
    for pattern in pattern_R.unique().tolist():
        teachers = [number for number in range(len(present_CR)) if pattern >> number & 1]
        row_T = (pattern_R == pattern).nonzero()[:, 0]
        contexts = (0, *(number + 1 for number in teachers))
        yield RowGroup(contexts, row_T, received_CR[teachers][:, row_T])
