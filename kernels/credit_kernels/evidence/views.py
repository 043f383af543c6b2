"""The contexts of the tokens that count, and their logits, some rows at a time.

A few rows are taken over all columns of this rank, so that one product a context serves both the
normalisers and what needs them; R counts rows, C contexts, V columns of this rank without padding.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from credit_kernels.evidence.contrast import Options
from credit_kernels.logprob.chunked import add_tile
from credit_kernels.logprob.head import Head
from credit_kernels.vocab_parallel import LOWEST, LocalStats

HELD_LOGITS = 2**24
"""64 MiB in float32; the products are the faster the more rows fit in."""
BLOCK_LOGITS = 2**18
"""Of one context: 1 MiB in float32 stays in cache while the element-wise passes go over it."""


@dataclass(frozen=True, eq=False)
class Views:
    """The output heads of all contexts on the rows that count."""

    heads: tuple[Head, ...]
    target_R: Tensor
    teacher_weight_VH: Tensor | None
    """Output weight of all contexts but the first; None: the same."""
    options: Options
    threshold_JR: Tensor | None = None
    """Logits that the support of top_k reaches down to; None: all columns."""

    @classmethod
    def of(
        cls,
        hidden_CTH: Tensor,
        weight_VH: Tensor,
        teacher_weight_VH: Tensor | None,
        target_T: Tensor,
        options: Options,
    ) -> tuple["Views", Tensor]:
        """The views, and the numbers of their rows among all tokens."""
        shard = options.shard
        row_R = ((target_T >= 0) & (target_T < shard.total)).nonzero()[:, 0]
        heads = tuple(
            Head.of(hidden_TH, weight_VH, row_R, shard, options.temperature, options.softcap)
            for hidden_TH in hidden_CTH
        )
        return cls(heads, target_T[row_R], teacher_weight_VH, options), row_R

    @property
    def num_columns(self) -> int:
        """Columns on this rank."""
        return self.heads[0].columns

    def row_blocks(self) -> list[slice]:
        """Row ranges whose logits are held at once; one range if there are no rows."""
        return _ranges(len(self.target_R), HELD_LOGITS // (len(self.heads) * self.num_columns + 1))

    def parts(self, rows: slice) -> list[slice]:
        """Ranges within a row range whose element-wise passes stay in cache."""
        return _ranges(rows.stop - rows.start, BLOCK_LOGITS // (self.num_columns + 1))

    def column_blocks(self) -> Iterator[tuple[slice, list[Tensor]]]:
        """Column ranges with the part of the weight of every context in the computing type."""
        for block, weight_NH in self.heads[0].column_blocks():
            yield block, self.weights(block, weight_NH)

    def weights(self, block: slice, weight_NH: Tensor) -> list[Tensor]:
        """For every context the part of its weight, that of the student given."""
        teacher_NH = weight_NH
        if self.teacher_weight_VH is not None:
            teacher_NH = self.teacher_weight_VH[block].to(weight_NH.dtype)
        return [weight_NH] + [teacher_NH] * (len(self.heads) - 1)

    def logits(self) -> Iterator[tuple[slice, Tensor, LocalStats]]:
        """Row ranges, their logits in all contexts, [C, R, V], and the softmaxes of those.

        The logits are gone when the next ones are asked for. The softmaxes go tile by tile, as
        those of linear_logprob do, whose bits they have.
        """
        row_blocks = self.row_blocks()
        held = self.heads[0].scaled_RH.new_empty(
            len(self.heads), row_blocks[0].stop, self.num_columns
        )
        for rows in row_blocks:
            logit_CRV = held[:, : rows.stop - rows.start]
            max_CR = held.new_full(logit_CRV.shape[:2], LOWEST)
            sum_CR, moment_CR = held.new_zeros(2, *logit_CRV.shape[:2])
            for block, weights in self.column_blocks() if max_CR.numel() else ():
                for context, (head, weight_NH) in enumerate(zip(self.heads, weights, strict=True)):
                    tile_RN = head.logits(rows, weight_NH)
                    logit_CRV[context, :, block] = tile_RN
                    add_tile(tile_RN, max_CR[context], sum_CR[context], moment_CR[context])
            logit_CR, owned_R = self._target_logits(rows, logit_CRV)
            yield (
                rows,
                logit_CRV,
                LocalStats(max_CR, sum_CR, moment_CR, logit_CR, owned_R.expand_as(logit_CR)),
            )

    def _target_logits(self, rows: slice, logit_CRV: Tensor) -> tuple[Tensor, Tensor]:
        num_contexts, num_rows, num_columns = logit_CRV.shape
        column_R1, owned_R1 = self.heads[0].target_column(
            self.target_R[rows], slice(0, num_columns)
        )
        if num_columns == 0:
            return logit_CRV.new_zeros(num_contexts, num_rows), owned_R1[:, 0]
        logit_CR1 = logit_CRV.gather(2, column_R1.expand(num_contexts, -1, -1))
        return logit_CR1.where(owned_R1, 0)[..., 0], owned_R1[:, 0]


def _ranges(total: int, size: int) -> list[slice]:
    size = max(size, 1)
    return [slice(at, min(at + size, total)) for at in range(0, max(total, 1), size)]
