"""Sequences of different lengths laid end to end as one micro-batch, aligned with next tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate

import torch
from torch import Tensor

from megatron_credit.batch.plan import Bin, plan_microbatches
from megatron_credit.batch.prefix_packing import SharedRows
from megatron_credit.batch.sequence import TrainSequence, all_or_none

IGNORED = -100
"""Target of a position whose next token is not a response token."""
TokenWeight = float | Tensor
"""Loss weight of the trained tokens of a sequence: of all of them, or float32 of each response
token."""


@dataclass(frozen=True, kw_only=True)
class Padding:
    """What lengths must be multiples of."""

    sequence: int = 1
    """Each sequence, so that context ranks get equal chunks."""
    total: int = 1
    """The whole micro-batch; a multiple of `sequence`."""

    @classmethod
    def for_layout(cls, *, tensor: int, context: int, sequence_parallel: bool) -> "Padding":
        """Context parallelism cuts each sequence into 2 x context chunks; sequence parallelism
        splits what a context rank holds over the tensor ranks."""
        sequence = 2 * context if context > 1 else 1
        total = math.lcm(sequence, context * tensor) if sequence_parallel else sequence
        return cls(sequence=sequence, total=total)

    def length(self, sequence: TrainSequence) -> int:
        """Positions that the sequence takes in a micro-batch."""
        return len(sequence.token_ids_L) + -len(sequence.token_ids_L) % self.sequence


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """A micro-batch. Position p holds what belongs to the token that is predicted at p, the next.

    `target_P` is the next token where that is a response token, else IGNORED: on prompt positions
    but the last of each prompt, on the last position of each sequence and on padding. `mask_P` is
    True where it is trained on. Other fields are 0 outside the response.
    """

    token_ids_P: Tensor
    position_ids_P: Tensor
    target_P: Tensor
    mask_P: Tensor
    slot_P: Tensor
    """Where the value of this target belongs in the flat list of all response tokens; -1: none."""
    weight_P: Tensor
    """Normalisation weight of the target in the loss, 0 where it is not trained on."""
    advantage_P: Tensor
    rollout_logprob_P: Tensor
    old_logprob_P: Tensor | None
    reference_logprob_P: Tensor | None
    routed_experts_PDK: Tensor | None
    """int16: experts that the token at p, not the predicted one, went to in the engine; -1 where
    that is not known and on padding."""
    boundaries_B1: Tensor
    """int32: sequence b takes the positions boundaries[b] to boundaries[b + 1] of the whole
    micro-batch, its padding included."""
    max_length: int
    """Longest of these."""
    shared: SharedRows | None = None
    """Where what sequences begin with alike is there once: what is read, and nothing is trained.
    No position has a target then."""

    @property
    def row_R(self) -> Tensor:
        """The positions that have a target."""
        if self.shared is not None:
            return self.shared.row_R
        return (self.target_P != IGNORED).nonzero().squeeze(-1)

    @property
    def target_R(self) -> Tensor:
        """The targets of these."""
        return self.target_P[self.row_R] if self.shared is None else self.shared.target_R

    def on(self, device: torch.device) -> "PackedBatch":
        """The same micro-batch with its tensors on `device`."""
        moved = {
            field.name: value.to(device)
            for field in fields(self)
            if isinstance(value := vars(self)[field.name], Tensor)
        }
        shared = None if self.shared is None else self.shared.on(device)
        return replace(self, **moved, shared=shared)


class Packer:
    """Packs sets of these sequences; what every micro-batch must agree on is settled once."""

    def __init__(
        self,
        sequences: Sequence[TrainSequence],
        *,
        weights: Sequence[TokenWeight],
        padding: Padding,
    ) -> None:
        """`weights` is the loss weight of each sequence's trained tokens.

        ValueError where only some sequences have old or reference log-probs or routed experts.
        """
        self.sequences = sequences
        self.weights = weights
        self.padding = padding
        self.has_old = all_or_none([s.old_logprob_T for s in sequences], "old_logprob_T")
        self.has_reference = all_or_none(
            [s.reference_logprob_T for s in sequences], "reference_logprob_T"
        )
        self.has_experts = all_or_none(
            [s.routed_experts_LDK for s in sequences], "routed_experts_LDK"
        )
        self.slots = list(accumulate((s.num_response for s in sequences), initial=0))
        """Where each sequence's first response token stands in the flat list; last, its length."""

    def plan(self, *, max_tokens: int, num_ranks: int, multiple_of: int) -> list[list[Bin]]:
        """`plan_microbatches` of these sequences; the bound holds for the padded micro-batches."""
        bound = max(1, max_tokens // self.padding.total * self.padding.total)
        return plan_microbatches(
            self.lengths_N(), max_tokens=bound, num_ranks=num_ranks, multiple_of=multiple_of
        )

    def lengths_N(self) -> list[int]:
        """Positions that each sequence takes in a micro-batch."""
        return [self.padding.length(sequence) for sequence in self.sequences]

    def share(self, indices: Sequence[int], *, rank: int, size: int) -> PackedBatch:
        """What context rank `rank` of `size` holds of the chosen sequences as one micro-batch."""
        return context_shard(self.pack(indices), rank=rank, size=size)

    def pack(self, indices: Sequence[int]) -> PackedBatch:
        """The chosen sequences as one micro-batch, in this order; none: a dummy of padding.

        Padding follows its sequence, so causal attention never shows it to a real token, and counts
        as part of it in the boundaries.
        """
        total = self.padding.total
        lengths = [self.padding.length(self.sequences[index]) for index in indices] or [total]
        lengths[-1] += -sum(lengths) % total
        boundaries_B1 = torch.tensor([0, *lengths]).cumsum(0)
        batch = self._blank(lengths, boundaries_B1.int())
        for index, start in zip(indices, boundaries_B1.tolist(), strict=False):
            weight, slot = self.weights[index], self.slots[index]
            _place(batch, self.sequences[index], start, weight, slot)
        return batch

    def _blank(self, lengths: list[int], boundaries_B1: Tensor) -> PackedBatch:
        """A micro-batch of padding with room for the sequences."""
        total = sum(lengths)
        return PackedBatch(
            token_ids_P=torch.zeros(total, dtype=torch.int64),
            position_ids_P=torch.cat([torch.arange(length) for length in lengths]),
            target_P=torch.full((total,), IGNORED),
            mask_P=torch.zeros(total, dtype=torch.bool),
            slot_P=torch.full((total,), -1),
            weight_P=torch.zeros(total),
            advantage_P=torch.zeros(total),
            rollout_logprob_P=torch.zeros(total),
            old_logprob_P=torch.zeros(total) if self.has_old else None,
            reference_logprob_P=torch.zeros(total) if self.has_reference else None,
            routed_experts_PDK=self._unknown_experts(total),
            boundaries_B1=boundaries_B1,
            max_length=max(lengths),
        )

    def _unknown_experts(self, total: int) -> Tensor | None:
        """-1 for every position, layer and choice, where the sequences have experts at all."""
        if not self.has_experts:
            return None
        experts_LDK = self.sequences[0].routed_experts_LDK
        assert experts_LDK is not None
        return experts_LDK.new_full((total, *experts_LDK.shape[1:]), -1)


def _place(
    batch: PackedBatch, sequence: TrainSequence, start: int, weight: TokenWeight, slot: int
) -> None:
    """Writes one sequence at `start`; its response is predicted one position earlier."""
    batch.token_ids_P[start : start + len(sequence.token_ids_L)] = sequence.token_ids_L
    first = start + sequence.num_prompt - 1
    predicted = slice(first, first + sequence.num_response)
    batch.target_P[predicted] = sequence.token_ids_L[sequence.num_prompt :]
    batch.mask_P[predicted] = sequence.mask_T
    batch.slot_P[predicted] = torch.arange(slot, slot + sequence.num_response)
    batch.weight_P[predicted] = weight * sequence.mask_T
    batch.advantage_P[predicted] = sequence.advantage_T
    batch.rollout_logprob_P[predicted] = sequence.rollout_logprob_T
    if batch.old_logprob_P is not None and sequence.old_logprob_T is not None:
        batch.old_logprob_P[predicted] = sequence.old_logprob_T
    if batch.reference_logprob_P is not None and sequence.reference_logprob_T is not None:
        batch.reference_logprob_P[predicted] = sequence.reference_logprob_T
    if batch.routed_experts_PDK is not None and sequence.routed_experts_LDK is not None:
        routed_LDK = sequence.routed_experts_LDK
        batch.routed_experts_PDK[start : start + len(routed_LDK)] = routed_LDK


def context_positions(boundaries_B1: Tensor, *, rank: int, size: int) -> Tensor:
    """The positions of the micro-batch that context rank `rank` of `size` holds, in its order.

    Each sequence is cut into 2 x size chunks and rank r holds chunks r and 2 x size - 1 - r, so
    that every rank has the same share of the causal triangle.
    """
    if size == 1:
        return torch.arange(int(boundaries_B1[-1]))
    parts = []
    for start, stop in zip(boundaries_B1[:-1].tolist(), boundaries_B1[1:].tolist(), strict=True):
        chunk = (stop - start) // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            parts.append(torch.arange(start + number * chunk, start + (number + 1) * chunk))
    return torch.cat(parts)


def context_shard(batch: PackedBatch, *, rank: int, size: int) -> PackedBatch:
    """What context rank `rank` of `size` holds; boundaries still refer to the whole micro-batch."""
    if size == 1:
        return batch
    position_P = context_positions(batch.boundaries_B1, rank=rank, size=size)
    shares = {
        field.name: value[position_P]
        for field in fields(batch)
        if field.name.endswith(("_P", "_PDK")) and (value := vars(batch)[field.name]) is not None
    }
    return replace(batch, **shares)
