"""The head as the Triton backends take it.

R counts the rows that are not ignored, C this rank's columns that are not padding.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from credit_kernels.logprob.function import Incoming
from credit_kernels.vocab_parallel import LOWEST, LocalStats, VocabShard


def blocks(length: int, size: int) -> int:
    """Blocks of the size that cover the length."""
    return -(-length // size)


@dataclass(frozen=True, eq=False)
class Operands:
    """Rows and columns that count, in the inputs' type, and how logits follow from products."""

    hidden_RH: Tensor
    weight_VH: Tensor
    """With the rows that are padding, behind the others."""
    num_columns: int
    start: int
    """Vocabulary column of the weight's first row."""
    temperature: float
    softcap: float | None

    @classmethod
    def of(
        cls,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        row_R: Tensor,
        shard: VocabShard,
        temperature: float,
        softcap: float | None,
    ) -> "Operands":
        """The head on the chosen rows; ignored rows are not even read, they may be NaN."""
        return cls(
            hidden_RH=hidden_TH if len(row_R) == len(hidden_TH) else hidden_TH[row_R],
            weight_VH=weight_VH,
            num_columns=shard.num_columns,
            start=shard.start,
            temperature=temperature,
            softcap=softcap,
        )

    @property
    def weight_CH(self) -> Tensor:
        """Rows of the weight that are columns of the vocabulary."""
        return self.weight_VH[: self.num_columns]

    @property
    def is_empty(self) -> bool:
        """No logit at all."""
        return len(self.hidden_RH) == 0 or self.num_columns == 0

    @property
    def scale(self) -> float:
        """Factor of the products, after the softcap."""
        return 1 / self.temperature

    @property
    def cap(self) -> float:
        """The softcap; 1 for none, which nothing reads."""
        return 1.0 if self.softcap is None else self.softcap

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Type of the gradients of products: what the tensor cores take, else float32."""
        return self.hidden_RH.dtype if self.hidden_RH.is_cuda else torch.float32

    def target_column(self, target_R: Tensor) -> Tensor:
        """int32 row of weight_CH of each target, -1 where another rank has it."""
        column_R = target_R - self.start
        owned_R = (column_R >= 0) & (column_R < self.num_columns)
        return torch.where(owned_R, column_R, -1).int()

    def empty_stats(self, column_R: Tensor) -> LocalStats:
        """Statistics over no columns yet, for a kernel to write to."""
        # Memory of their own: Triton compiles again for pointers that are aligned otherwise.
        max_R, sum_R, moment_R, logit_R = (
            torch.full_like(column_R, value, dtype=torch.float32) for value in (LOWEST, 0, 0, 0)
        )
        return LocalStats(max_R, sum_R, moment_R, logit_R, column_R >= 0)

    def row_gradients(self, incoming: Incoming) -> tuple[Tensor, Tensor, Tensor]:
        """grad_logprob, factor and slope of each row, for the products instead of the logits."""
        slope_R = incoming.slope_R
        return (
            incoming.grad_logprob_R * self.scale,
            incoming.factor_R * self.scale,
            torch.zeros_like(incoming.max_R) if slope_R is None else slope_R * self.scale,
        )
