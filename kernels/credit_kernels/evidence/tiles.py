"""The `tiles` backend: the contexts share each tile of the weight, and no logit leaves the chip.

Every program makes the sums of some rows over a split of the columns; splits merge in float64 as
shards do, in order. The backward pass makes the gradient of the student's products, a slice of the
columns at a time, and leaves the two products with it to the vendor's library.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from credit_kernels.dispatch import chunk_bytes
from credit_kernels.evidence import tile_kernels
from credit_kernels.evidence.function import Backend
from credit_kernels.evidence.moments import Moments
from credit_kernels.evidence.operands import Contexts
from credit_kernels.evidence.plan import Plan, merged_splits, moments_of
from credit_kernels.evidence.tables import (
    SPLIT_COLUMNS,
    SUMS_SIZES,
    TILE_SIZES,
    refusal_of_tiles,
    tile_size,
)
from credit_kernels.logprob.operands import blocks
from credit_kernels.logprob.tables import TileSize
from credit_kernels.logprob.tiles import Launch, dense, slice_columns, write_target_logits
from credit_kernels.products import add_product, product
from credit_kernels.targets import target_of
from credit_kernels.vocab_parallel import LocalStats


def prepared(contexts: Contexts) -> Contexts:
    """As they are; ValueError for what the programs do not do."""
    problem = refusal_of_tiles(
        contexts.options, len(contexts.hidden_CRH), contexts.teacher_weight_VH is not None
    )
    if problem is not None:
        raise ValueError(f"backend='tiles' cannot run this: {problem}")
    return contexts


def local_moments(contexts: Contexts, plan: Plan) -> Moments:
    """Statistics over this rank's columns: a pass for the softmaxes and one for the sums."""
    if contexts.head(0).is_empty:
        return contexts.no_moments(plan)
    tiles = Tiles.of(contexts, plan)
    known, softmax = contexts.with_softmaxes(softmaxes(tiles))
    sums_NR = known.number_NR[:0]
    if plan.count:
        pieces = tiles.split_sums(tile_kernels.tile_sums, plan.count, known.number_NR)
        sums_NR = torch.cat([merged_splits(sums_NSR, plan) for sums_NSR in pieces], 1)
    return moments_of(softmax, sums_NR, plan, contexts.options.contrast)


def softmaxes(tiles: "Tiles") -> LocalStats:
    """[C, R]: of the contexts."""
    contexts = tiles.contexts
    stats, count = contexts.no_softmaxes(), len(tiles.hidden_CRH)
    for context, logit_R in enumerate(stats.target_T):
        hidden_RH = tiles.hidden_CRH[context]
        write_target_logits(
            logit_R, contexts.head(context), hidden_RH, tiles.weight_VH, contexts.column_R
        )
    pieces = [
        merged_softmax(sums_NSR.unflatten(0, (count, 3)).unbind(1))
        for sums_NSR in tiles.split_sums(tile_kernels.tile_softmax, 3 * count)
    ]
    max_CR, sum_CR, moment_CR = (torch.cat(parts, -1) for parts in zip(*pieces, strict=True))
    return replace(stats, max_T=max_CR, sum_T=sum_CR, moment_T=moment_CR)


def tilted(contexts: Contexts, plan: Plan) -> LocalStats:
    """Softmax of a sum of coefficient times log-prob."""
    stats = contexts.no_softmaxes()[0]
    if contexts.head(0).is_empty:
        return stats
    tiles = Tiles.of(contexts, plan)
    pieces = [
        merged_softmax((*sums_2SR, torch.zeros_like(sums_2SR[0])))
        for sums_2SR in tiles.split_sums(tile_kernels.tile_tilted, 2, contexts.number_NR)
    ]
    max_R, sum_R, _ = (torch.cat(parts, -1) for parts in zip(*pieces, strict=True))
    return replace(stats, max_T=max_R, sum_T=sum_R)


def merged_softmax(split_3: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum, sum and moment over all splits, from those over each, [.., S, R]."""
    max_SR, sum_SR, moment_SR = split_3
    nowhere_SR = torch.zeros_like(max_SR, dtype=torch.bool)
    splits = LocalStats(max_SR, sum_SR, moment_SR, max_SR, nowhere_SR)
    max_R = max_SR.amax(-2)
    sum_R, moment_R, _ = splits.relative_to(max_R[..., None, :]).sum(-2)
    return max_R, sum_R, moment_R


def gradients(
    contexts: Contexts, plan: Plan, wants_hidden: bool, wants_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the student's rows and of the weight, added up in float32."""
    student = contexts.head(0)
    grad_RH = torch.zeros_like(student.hidden_RH, dtype=torch.float32) if wants_hidden else None
    grad_VH = torch.zeros_like(student.weight_VH) if wants_weight else None
    if not student.is_empty:
        tiles = Tiles.of(contexts, plan)
        for columns, grad_RS in tiles.gradient_slices(contexts.number_NR):
            if grad_RH is not None:
                add_product(grad_RH, grad_RS, tiles.weight_VH[columns].T)
            if grad_VH is not None:
                grad_VH[columns] = product(grad_RS.T, tiles.hidden_CRH[0].T)
    return None if grad_RH is None else grad_RH.to(student.hidden_RH.dtype), grad_VH


@dataclass(frozen=True, eq=False)
class Tiles:
    """The operands as the programs want them, with adjacent columns."""

    hidden_CRH: Tensor
    weight_VH: Tensor
    contexts: Contexts
    plan: Plan

    @classmethod
    def of(cls, contexts: Contexts, plan: Plan) -> "Tiles":
        """There is a row and a column."""
        hidden_CRH = contexts.hidden_CRH.contiguous()
        return cls(hidden_CRH, dense(contexts.head(0).weight_CH), contexts, plan)

    def split_sums(self, program: Any, count: int, *numbers: Tensor) -> Iterator[Tensor]:
        """[count, splits, rows] sums over each split of the columns, some rows at a time."""
        head, num_rows = self.contexts.head(0), self.hidden_CRH.shape[1]
        sizes = SUMS_SIZES if program is tile_kernels.tile_sums else TILE_SIZES
        launch = self._launch(self.weight_VH, sizes)
        num_splits = blocks(head.num_columns, SPLIT_COLUMNS)
        # float32 sums, and in float64 what they stand for, once relative and once merged.
        row_bytes = num_splits * count * (4 + 8 + 8)
        step = max(chunk_bytes(self.hidden_CRH.device) // row_bytes // 128 * 128, 128)
        for first in range(0, num_rows, step):
            stop = min(first + step, num_rows)
            sums_NSR = self.contexts.number_NR.new_empty(count, num_splits, stop - first)
            program[(blocks(stop - first, launch.constants["ROWS"]) * num_splits,)](
                *launch.sources,
                *numbers,
                sums_NSR,
                num_rows,
                *launch.extents[1:],
                first,
                stop,
                head.scale,
                head.cap,
                PLAN=self.plan,
                SPLIT=SPLIT_COLUMNS,
                **launch.constants,
            )
            yield sums_NSR

    def gradient_slices(self, number_NR: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Column ranges and the gradient of the student's products there."""
        head, num_rows = self.contexts.head(0), self.hidden_CRH.shape[1]
        width = slice_columns(head)
        buffer_RS = self.hidden_CRH.new_empty(num_rows, width, dtype=head.gradient_dtype)
        for first in range(0, head.num_columns, width):
            columns = slice(first, min(first + width, head.num_columns))
            grad_RS = buffer_RS[:, : columns.stop - first]
            self.write_gradient(grad_RS, columns, number_NR)
            yield columns, grad_RS

    def write_gradient(self, grad_RS: Tensor, columns: slice, number_NR: Tensor) -> None:
        """Gradient of the student's products in some columns; its rows reach to whole tiles."""
        head, num_rows = self.contexts.head(0), self.hidden_CRH.shape[1]
        weight_SH = self.weight_VH[columns]
        launch = self._launch(weight_SH, TILE_SIZES)
        row_blocks = blocks(num_rows, launch.constants["ROWS"])
        column_blocks = blocks(len(weight_SH), launch.constants["COLUMNS"])
        tile_kernels.tile_gradient[(row_blocks * column_blocks,)](
            *launch.sources,
            grad_RS,
            number_NR,
            num_rows,
            *launch.extents[1:],
            grad_RS.stride(0),
            head.scale,
            head.cap,
            PLAN=self.plan,
            **launch.constants,
        )

    def _launch(self, weight_SH: Tensor, sizes: dict[str, TileSize]) -> Launch:
        capped = self.contexts.options.softcap is not None
        target = target_of(weight_SH.device)
        size = tile_size(sizes, target, weight_SH.element_size(), capped=capped)
        return Launch.of(self.hidden_CRH.flatten(0, 1), weight_SH, size, capped)


BACKEND = Backend(prepared, local_moments, tilted, gradients)
