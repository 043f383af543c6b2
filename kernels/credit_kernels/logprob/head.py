"""Logits of the output head, one tile at a time.

R counts the rows that are not ignored, C the columns of a tile.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from credit_kernels.matmul import matmul_nt
from credit_kernels.vocab_parallel import VocabShard

TILE_ROWS = 1024
TILE_COLUMNS = 512
"""A tile of 2 MiB in float32 stays in cache while the element-wise passes go over it."""


def exp_(x: Tensor) -> Tensor:
    """exp(x) in place, for x <= 0, through exp2.

    On CPUs that takes a quarter of the time of exp, which is slower still, up to 30 times, where
    the result is nearly 0.
    """
    return x.mul_(math.log2(math.e)).exp2_()


@dataclass(frozen=True, eq=False)
class Head:
    """The rows and columns that count, and how their logits are made."""

    scaled_RH: Tensor
    """Hidden states times `scale`, in the computing type."""
    weight_VH: Tensor
    start: int
    """Vocabulary column of the weight's first row."""
    columns: int
    """Rows of the weight that count; those behind them are padding."""
    scale: float
    cap: float | None
    """If not None, the logits are cap tanh(scaled @ weight.T)."""

    @classmethod
    def of(
        cls,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        row_R: Tensor,
        shard: VocabShard,
        temperature: float,
        softcap: float | None,
    ) -> "Head":
        """The head on the chosen rows; ignored rows are not even read, they may be NaN."""
        scale = 1 / temperature if softcap is None else 1 / softcap
        compute = torch.promote_types(hidden_TH.dtype, torch.float32)
        chosen_RH = hidden_TH if len(row_R) == len(hidden_TH) else hidden_TH[row_R]
        return cls(
            scaled_RH=chosen_RH.to(compute) if scale == 1 else chosen_RH.to(compute) * scale,
            weight_VH=weight_VH,
            start=shard.start,
            columns=shard.num_columns,
            scale=scale,
            cap=None if softcap is None else softcap / temperature,
        )

    def column_blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Column ranges with their part of the weight in the computing type."""
        for begin in range(0, self.columns, TILE_COLUMNS):
            block = slice(begin, min(begin + TILE_COLUMNS, self.columns))
            yield block, self.weight_VH[block].to(self.scaled_RH.dtype)

    def row_blocks(self) -> list[slice]:
        """Row ranges."""
        num_rows = len(self.scaled_RH)
        return [slice(at, min(at + TILE_ROWS, num_rows)) for at in range(0, num_rows, TILE_ROWS)]

    def logits(self, rows: slice, weight_CH: Tensor) -> Tensor:
        """[rows, columns] logits of one tile."""
        tile_RC = matmul_nt(self.scaled_RH[rows], weight_CH)
        return tile_RC if self.cap is None else tile_RC.tanh_().mul_(self.cap)

    def cap_slope(self, tile_RC: Tensor) -> Tensor | None:
        """d logits / d matrix product; None for 1."""
        if self.cap is None:
            return None
        return tile_RC.square().mul_(-1 / self.cap).add_(self.cap)

    def target_column(self, target_R: Tensor, block: slice) -> tuple[Tensor, Tensor]:
        """[R, 1] column of each target within the block, and whether it is there (else 0).

        Without a wait for the device, which listing the rows would be.
        """
        column_R1 = target_R[:, None] - (self.start + block.start)
        owned_R1 = (column_R1 >= 0) & (column_R1 < block.stop - block.start)
        return column_R1.where(owned_R1, 0), owned_R1
