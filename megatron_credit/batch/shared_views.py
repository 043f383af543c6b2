"""Several views of each rollout in one micro-batch, what they begin with alike read once.

Rollouts of one prompt are kept together, as their views share most. Only what is read without a
gradient is packed so; the plain views of a pass that trains lie one after the other as ever. There
is one context rank: others would hold pieces of every beginning.

Shape letters: those of `batch.view_packing` and `batch.prefix_packing`.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_credit.batch.packing import PackedBatch
from megatron_credit.batch.plan import Bin
from megatron_credit.batch.prefix_packing import (
    Prefixes,
    SharedRows,
    count_prefixes,
    distinct_rows,
    plan_families,
)
from megatron_credit.batch.view_packing import (
    Exchange,
    PackedViews,
    ViewPacker,
    present_views,
    row_groups,
)


class SharedViewPacker(ViewPacker):
    """Packs rollouts with all their views; needs our own attention and one context rank."""

    def plan(self, *, max_tokens: int, num_ranks: int, multiple_of: int) -> list[list[Bin]]:
        """Rollouts of a prompt together; the bound holds for the views of all contexts, and for the
        plain ones where nothing is shared."""
        plain = [one.plain for one in self.views]
        return plan_families(
            [one.token_ids_L[: one.num_prompt] for one in plain],
            self._length,
            max_tokens=max(1, max_tokens // self.padding.total * self.padding.total),
            num_ranks=num_ranks,
            multiple_of=multiple_of,
        )

    def _length(self, members: Sequence[int]) -> int:
        views = [self._read_ids(index, context) for index, context, _ in self._chosen(members)]
        plain = sum(self.padding.length(self.views[index].plain) for index in members)
        return max(plain, count_prefixes(views))

    def shares_apart(
        self, indices: Sequence[int], *, rank: int, size: int
    ) -> tuple[PackedViews, PackedViews]:
        """The plain views as ever, to be trained on; the teachers' share what they begin with."""
        _check_alone(size)
        teachers, position_CF = self._laid_out(indices, first_context=1)
        exchange = _exchange(indices, position_CF[1:])
        return (
            self.trained_apart(exchange, rank=rank, size=size),
            PackedViews(**vars(self._batch(teachers)), exchange=exchange),
        )

    def scored(self, indices: Sequence[int], *, rank: int, size: int) -> PackedViews:
        """All views in one micro-batch; each different token, with its contexts, is a row."""
        _check_alone(size)
        together, position_CF = self._laid_out(indices, first_context=0)
        exchange = _exchange(indices, position_CF[1:])
        return self._told_apart(together, position_CF[0], exchange)

    def scored_apart(self, exchange: Exchange, *, rank: int, size: int) -> PackedViews:
        """The plain views alone, beside the teachers' of `shares_apart`, whose exchange it is."""
        _check_alone(size)
        plain, plain_CF = self._laid_out(exchange.rollouts, first_context=0, last_context=0)
        return self._told_apart(plain, plain_CF[0], exchange)

    def _chosen(self, indices: Sequence[int]) -> list[tuple[int, int, int]]:
        """(rollout, context, tokens of its prompt) of the views that there are and are read."""
        chosen = []
        for index in indices:
            one = self.views[index]
            if one.plain.num_response:
                teachers = present_views(one)
                chosen.append((index, 0, one.plain.num_prompt))
                chosen += [(index, number + 1, view.num_prompt) for number, view in teachers]
        return chosen

    def _read_ids(self, index: int, context: int) -> Tensor:
        """The tokens that are read: the last one is only predicted."""
        one = self.views[index]
        view = one.teachers[context - 1] if context else one.plain
        assert view is not None
        return view.token_ids_L[:-1]

    def _laid_out(
        self, indices: Sequence[int], *, first_context: int, last_context: int | None = None
    ) -> tuple[Prefixes, Tensor]:
        """The views of these contexts, and [C, F] where each response token is predicted, or -1."""
        last = self.num_contexts if last_context is None else last_context
        chosen = [one for one in self._chosen(indices) if first_context <= one[1] <= last]
        prefixes = Prefixes.of(
            [self._read_ids(index, context) for index, context, _ in chosen],
            multiple_of=self.padding.total,
        )
        sizes = [self.views[index].plain.num_response for index in indices]
        starts = dict(zip(indices, torch.tensor([0, *sizes]).cumsum(0).tolist(), strict=False))
        position_CF = torch.full((self.num_contexts, sum(sizes)), -1)
        for (index, context, num_prompt), path_L in zip(chosen, prefixes.paths, strict=True):
            predicted_T = path_L[num_prompt - 1 :]
            start = starts[index]
            position_CF[context, start : start + len(predicted_T)] = predicted_T
        return prefixes, position_CF

    def _batch(self, prefixes: Prefixes) -> PackedBatch:
        """As a micro-batch in which nothing is predicted."""
        nothing = torch.zeros(0, dtype=torch.int64)
        boundaries_B1 = torch.tensor([0, *prefixes.lengths]).cumsum(0).int()
        return replace(
            self._blank(list(prefixes.lengths), boundaries_B1),
            token_ids_P=prefixes.token_ids_P,
            position_ids_P=prefixes.depth_P,
            shared=SharedRows(prefixes.lengths, prefixes.depth_P, prefixes.before, *(nothing,) * 4),
        )

    def _told_apart(self, prefixes: Prefixes, plain_F: Tensor, exchange: Exchange) -> PackedViews:
        """With a row for each response token that differs from the others in any context."""
        # That of a reading is on its device.
        exchange = exchange.on(torch.device("cpu"))
        indices = exchange.rollouts
        plain = [self.views[index].plain for index in indices]
        none = torch.zeros(0, dtype=torch.int64)
        target_F = torch.cat([none, *(one.token_ids_L[one.num_prompt :] for one in plain)])
        slots = (torch.arange(one.num_response) for one in plain)
        firsts = (self.slots[self.places[index][0]] for index in indices)
        slot_F = torch.cat([none, *(s_T + at for s_T, at in zip(slots, firsts, strict=True))])
        received_CF = torch.full((self.num_contexts - 1, len(plain_F)), -1)
        for group in exchange.groups:
            teachers = [context - 1 for context in group.contexts[1:]]
            received_CF[torch.tensor(teachers, dtype=torch.int64)[:, None], group.row_T] = (
                group.received_CT
            )
        first_R, number_F = distinct_rows(plain_F, target_F, *received_CF)
        batch = self._batch(prefixes)
        assert batch.shared is not None
        shared = replace(
            batch.shared,
            row_R=plain_F[first_R],
            target_R=target_F[first_R],
            slot_F=slot_F,
            number_F=number_F,
        )
        told = replace(exchange, groups=tuple(row_groups(received_CF[:, first_R])))
        return PackedViews(**vars(replace(batch, shared=shared)), exchange=told)


def _exchange(indices: Sequence[int], position_CF: Tensor) -> Exchange:
    """Each position of the teachers' micro-batch that is needed, once, and for whom."""
    sent_S = position_CF[position_CF >= 0].unique()
    received_CF = torch.searchsorted(sent_S, position_CF)
    received_CF[position_CF < 0] = -1
    size = (len(sent_S),)
    return Exchange(tuple(indices), sent_S, size, size, tuple(row_groups(received_CF)))


def _check_alone(size: int) -> None:
    assert size == 1, "beginnings are shared within one context rank"
