"""Problems that tests and benchmarks share, each with the reason it is there."""

from dataclasses import dataclass

import torch
from torch import Tensor

from credit_kernels.divergence import divergence_loss
from credit_kernels.divergence.reference import Plain
from credit_kernels.logprob.cases import Case as Head
from credit_kernels.vocab_parallel import VocabShard


@dataclass(frozen=True, kw_only=True)
class Case(Head):
    """One problem: a head, a teacher and the divergence from it."""

    beta: float = 0.5
    top_k: int | None = None
    distance: float = 1.0
    """Scale of the random part of the teacher's hidden states, the rest being the student's."""
    frozen_teacher: bool = False
    """The teacher has an output weight of its own."""

    def teacher(self, hidden_TH: Tensor, weight_VH: Tensor) -> tuple[Tensor, Tensor | None]:
        """teacher_hidden_TH and teacher_weight_VH, the same numbers in every type."""
        generator = torch.Generator().manual_seed(13)
        noise_TH = torch.randn(hidden_TH.shape, generator=generator).double()
        if self.offset:
            noise_TH[:, 0] = 0
        teacher_TH = hidden_TH.detach().double() + self.distance * noise_TH
        own_VH = None
        if self.frozen_teacher:
            own_VH = torch.randn(weight_VH.shape, generator=generator)
            own_VH = own_VH.to(torch.bfloat16).to(weight_VH)
        return teacher_TH.to(torch.bfloat16).to(hidden_TH), own_VH

    def compute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor, *, backend: str = "auto"
    ) -> tuple[Tensor, ...]:
        """divergence_T by the operation."""
        teacher_TH, teacher_VH = self.teacher(hidden_TH, weight_VH)
        shard = VocabShard(0, self.rows, self.total)
        return self.compute_on(
            hidden_TH, teacher_TH, weight_VH, target_T, teacher_VH, shard, backend=backend
        )

    def compute_on(
        self,
        hidden_TH: Tensor,
        teacher_hidden_TH: Tensor,
        weight_VH: Tensor,
        target_T: Tensor,
        teacher_weight_VH: Tensor | None,
        shard: VocabShard,
        *,
        backend: str = "auto",
    ) -> tuple[Tensor, ...]:
        """The same with a shard's part of the weights."""
        divergence_T = divergence_loss(
            hidden_TH,
            teacher_hidden_TH,
            weight_VH,
            target_T,
            beta=self.beta,
            top_k=self.top_k,
            temperature=self.temperature,
            softcap=self.softcap,
            shard=shard,
            teacher_weight_VH=teacher_weight_VH,
            backend=backend,
        )
        return (divergence_T,)

    def plain(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor
    ) -> tuple[Tensor, ...]:
        """The same by the reference; the truth if the inputs are float64."""
        plain = Plain(
            total=self.total,
            beta=self.beta,
            top_k=self.top_k,
            temperature=self.temperature,
            softcap=self.softcap,
        )
        teacher_TH, teacher_VH = self.teacher(hidden_TH, weight_VH)
        return (plain.divergence(hidden_TH, teacher_TH, weight_VH, target_T, teacher_VH),)


CASES = (
    Case(name="small", tokens=9, hidden=16, rows=50, total=50),
    Case(name="one_row", tokens=1, hidden=4, rows=3, total=3, ignored=0.0),
    Case(name="no_row", tokens=0, hidden=4, rows=5, total=5),
    Case(name="no_row_top_k", tokens=0, hidden=4, rows=5, total=5, top_k=2),
    Case(name="all_ignored", tokens=6, hidden=4, rows=7, total=7, ignored=1.1, top_k=2),
    Case(name="one_column", tokens=5, hidden=4, rows=1, total=1, top_k=1),
    Case(name="forward", tokens=20, hidden=8, rows=97, total=90, beta=0.0),
    Case(name="reverse", tokens=20, hidden=8, rows=97, total=90, beta=1.0),
    Case(name="uneven", tokens=20, hidden=8, rows=97, total=90, beta=0.3, frozen_teacher=True),
    Case(name="capped", tokens=20, hidden=8, rows=97, total=90, temperature=0.7, softcap=2.0),
    # More than one tile of columns and block of rows, neither a whole number of them.
    Case(name="many_tiles", tokens=1100, hidden=8, rows=1203, total=1203, frozen_teacher=True),
    # A maximum that starts at 0 fails here.
    Case(name="far_below_zero", tokens=20, hidden=8, rows=97, total=97, offset=-200.0),
    Case(name="far_above_zero", tokens=20, hidden=8, rows=700, total=700, offset=500.0, top_k=9),
    # A power of two scales without rounding, which beside logits of 100 would be the largest error.
    Case(name="sure", tokens=20, hidden=8, rows=97, total=97, temperature=0.125),
    # The tail's probability is far below the rounding of 1.
    Case(name="sure_top_k", tokens=20, hidden=8, rows=97, total=97, temperature=0.125, top_k=7,
         beta=0.0),
    Case(name="near", tokens=20, hidden=8, rows=97, total=97, distance=0.02),
    Case(name="top_k", tokens=20, hidden=8, rows=97, total=90, top_k=7),
    Case(name="top_1", tokens=20, hidden=8, rows=97, total=90, top_k=1, beta=0.3),
    Case(name="top_k_forward", tokens=20, hidden=8, rows=97, total=90, top_k=7, beta=0.0,
         softcap=3.0),
    Case(name="top_k_reverse", tokens=20, hidden=8, rows=97, total=90, top_k=7, beta=1.0,
         frozen_teacher=True),
    Case(name="all_but_one", tokens=20, hidden=8, rows=97, total=90, top_k=89),
    Case(name="all_told_apart", tokens=20, hidden=8, rows=97, total=90, top_k=90),
    Case(name="many_tiles_top_k", tokens=1100, hidden=8, rows=1203, total=1203, top_k=100),
)  # fmt: skip
