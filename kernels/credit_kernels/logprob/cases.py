"""Problems that tests and benchmarks share, each with the reason it is there."""

from dataclasses import dataclass

import torch
from torch import Tensor

from credit_kernels.logprob import linear_logprob
from credit_kernels.logprob.reference import linear_logprob_reference
from credit_kernels.vocab_parallel import VocabShard


@dataclass(frozen=True, kw_only=True)
class Case:
    """One problem: sizes, options and how its numbers are drawn."""

    name: str
    tokens: int
    hidden: int
    rows: int
    """Rows of the weight, padding included."""
    total: int
    """Columns that count."""
    temperature: float = 1.0
    softcap: float | None = None
    offset: float = 0.0
    """Common offset of all logits, made by a constant hidden feature."""
    ignored: float = 0.2
    """Share of ignored targets."""

    def draw(self, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """hidden_TH, weight_VH, target_T; the first two are differentiable inputs."""
        generator = torch.Generator().manual_seed(seed)
        hidden_TH = torch.randn(self.tokens, self.hidden, generator=generator)
        weight_VH = torch.randn(self.rows, self.hidden, generator=generator)
        if self.offset:
            hidden_TH[:, 0] = 1.0
            weight_VH[:, 0] = self.offset
        target_T = torch.randint(self.total, (self.tokens,), generator=generator)
        ignored_T = torch.rand(self.tokens, generator=generator) < self.ignored
        return hidden_TH.to(dtype), weight_VH.to(dtype), target_T.masked_fill(ignored_T, -100)

    def compute(
        self, hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor, *, backend: str = "auto"
    ) -> tuple[Tensor, Tensor]:
        """logprob_T and entropy_T by the operation."""
        logprob_T, entropy_T = linear_logprob(
            hidden_TH,
            weight_VH,
            target_T,
            temperature=self.temperature,
            softcap=self.softcap,
            shard=VocabShard(0, self.rows, self.total),
            backend=backend,
            return_entropy=True,
        )
        return logprob_T, entropy_T

    def plain(
        self, hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same by the reference; the truth if the inputs are float64."""
        return linear_logprob_reference(
            hidden_TH,
            weight_VH,
            target_T,
            total=self.total,
            temperature=self.temperature,
            softcap=self.softcap,
        )


CASES = (
    Case(name="small", tokens=9, hidden=16, rows=50, total=50),
    Case(name="one_row", tokens=1, hidden=4, rows=3, total=3, ignored=0.0),
    Case(name="no_row", tokens=0, hidden=4, rows=5, total=5),
    Case(name="all_ignored", tokens=6, hidden=4, rows=7, total=7, ignored=1.1),
    # More than one tile of tokens and of columns, neither a whole number of tiles.
    Case(name="many_tiles", tokens=1100, hidden=8, rows=1203, total=1203),
    # Sums so long that their order shows.
    Case(name="wide", tokens=11, hidden=1500, rows=40, total=37, temperature=30.0),
    Case(name="padded", tokens=33, hidden=8, rows=640, total=515),
    Case(name="hot", tokens=20, hidden=8, rows=97, total=97, temperature=0.3),
    Case(name="capped", tokens=20, hidden=8, rows=97, total=90, temperature=0.7, softcap=2.0),
    # A maximum that starts at 0, or moments that are not centred, fail here.
    Case(name="far_below_zero", tokens=20, hidden=8, rows=97, total=97, offset=-200.0),
    Case(name="far_above_zero", tokens=20, hidden=8, rows=700, total=700, offset=500.0),
    Case(name="one_column", tokens=5, hidden=4, rows=1, total=1),
)
