"""Problems that tests and benchmarks share, each with the reason it is there."""

from dataclasses import dataclass

import torch
from torch import Tensor

from credit_kernels.evidence import EvidenceStats, evidence_loss, evidence_stats
from credit_kernels.evidence.contrast import ContrastArgument
from credit_kernels.evidence.reference import Plain
from credit_kernels.logprob.cases import Case as Head
from credit_kernels.vocab_parallel import VocabShard

FEC: ContrastArgument = ("fec", 1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class Case(Head):
    """One problem for both operations: a head, several contexts and what is contrasted."""

    contexts: int = 4
    contrast: ContrastArgument = FEC
    divergence: str = "forward"
    top_k: int | None = None
    distance: float = 1.0
    """Scale of the random part of a teacher's hidden states, the rest being the student's."""
    frozen_teacher: bool = False
    """The teachers have an output weight of their own."""

    def draw(self, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """hidden_CTH, weight_VH, target_T; the first two are differentiable inputs."""
        student_TH, weight_VH, target_T = super().draw(torch.float32, seed)
        generator = torch.Generator().manual_seed(seed + 100)
        shape = (self.contexts, *student_TH.shape)
        hidden_CTH = student_TH + self.distance * torch.randn(shape, generator=generator)
        hidden_CTH[0] = student_TH
        if self.offset:
            hidden_CTH[:, :, 0] = 1.0
        return hidden_CTH.to(dtype), weight_VH.to(dtype), target_T

    def controller(self, hidden_CTH: Tensor) -> Tensor:
        """controller_T in [0, 1), the same numbers in every type."""
        generator = torch.Generator().manual_seed(11)
        return _same_in_every_type(torch.rand(self.tokens, generator=generator), hidden_CTH)

    def teacher_weight(self, weight_VH: Tensor) -> Tensor | None:
        """teacher_weight_VH, the same numbers in every type."""
        if not self.frozen_teacher:
            return None
        generator = torch.Generator().manual_seed(12)
        return _same_in_every_type(torch.randn(weight_VH.shape, generator=generator), weight_VH)

    def compute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden_CTH: Tensor, weight_VH: Tensor, target_T: Tensor, *, backend: str = "auto"
    ) -> tuple[Tensor, ...]:
        """reference_T, evidence_T and every field of EvidenceStats by the operations."""
        shard = VocabShard(0, self.rows, self.total)
        teacher_weight_VH = self.teacher_weight(weight_VH)
        return self.compute_on(
            hidden_CTH, weight_VH, target_T, teacher_weight_VH, shard, backend=backend
        )

    def compute_on(
        self,
        hidden_CTH: Tensor,
        weight_VH: Tensor,
        target_T: Tensor,
        teacher_weight_VH: Tensor | None,
        shard: VocabShard,
        *,
        backend: str = "auto",
    ) -> tuple[Tensor, ...]:
        """The same with a shard's part of the weights."""
        options = {
            "contrast": self.contrast,
            "temperature": self.temperature,
            "softcap": self.softcap,
            "shard": shard,
            "backend": backend,
            "teacher_weight_VH": teacher_weight_VH,
            "divergence": self.divergence,
            "top_k": self.top_k,
        }
        controller_T = self.controller(hidden_CTH)
        losses = evidence_loss(hidden_CTH, weight_VH, target_T, controller_T, **options)
        return *losses, *fields(evidence_stats(hidden_CTH, weight_VH, target_T, **options))

    def plain(self, hidden_CTH: Tensor, weight_VH: Tensor, target_T: Tensor) -> tuple[Tensor, ...]:
        """The same by the reference; the truth if the inputs are float64."""
        plain = Plain(
            total=self.total,
            contrast=self.contrast,
            temperature=self.temperature,
            softcap=self.softcap,
            divergence=self.divergence,
            top_k=self.top_k,
        )
        teacher_weight_VH = self.teacher_weight(weight_VH)
        inputs = (hidden_CTH, weight_VH, target_T)
        losses = plain.loss(*inputs, self.controller(hidden_CTH), teacher_weight_VH)
        with torch.no_grad():
            return *losses, *fields(plain.stats(*inputs, teacher_weight_VH))


def fields(stats: EvidenceStats) -> tuple[Tensor, ...]:
    """All that were computed."""
    values = (
        stats.logprob_CT,
        stats.entropy_CT,
        stats.kl_teacher_student_CT,
        stats.kl_student_teacher_CT,
        stats.alpha_T,
        stats.target_T,
        stats.mean_T,
        stats.cost_T,
    )
    return tuple(value for value in values if value is not None)


def _same_in_every_type(value: Tensor, like: Tensor) -> Tensor:
    return value.to(torch.bfloat16).to(like)


CASES = (
    Case(name="small", tokens=9, hidden=16, rows=50, total=50),
    Case(name="one_row", tokens=1, hidden=4, rows=3, total=3, ignored=0.0),
    Case(name="no_row", tokens=0, hidden=4, rows=5, total=5),
    Case(name="all_ignored", tokens=6, hidden=4, rows=7, total=7, ignored=1.1),
    Case(name="one_column", tokens=5, hidden=4, rows=1, total=1),
    # Evidence-free is the student itself, as in a run without a teacher of its own.
    Case(name="free_student", tokens=20, hidden=8, rows=97, total=90, contexts=3,
         contrast=("fec", 1, 2, 0)),
    Case(name="pair", tokens=20, hidden=8, rows=97, total=90, contrast=("pair", 1, 2, 3)),
    Case(name="fixed", tokens=20, hidden=8, rows=97, total=90, contexts=3,
         contrast=("fixed", 1, None, 2)),
    Case(name="negatives", tokens=20, hidden=8, rows=97, total=90, contexts=5,
         contrast=("fec", 1, (2, 4), 3)),
    # More than one tile of columns and block of rows, neither a whole number of them.
    Case(name="many_tiles", tokens=1100, hidden=8, rows=1203, total=1203, frozen_teacher=True),
    Case(name="capped", tokens=20, hidden=8, rows=97, total=90, temperature=0.7, softcap=2.0),
    # A maximum that starts at 0, or moments that are not centred, fail here.
    Case(name="far_below_zero", tokens=20, hidden=8, rows=97, total=97, offset=-200.0),
    Case(name="far_above_zero", tokens=20, hidden=8, rows=700, total=700, offset=500.0),
    # Contexts that nearly agree: d is a small difference of probabilities.
    Case(name="near", tokens=20, hidden=8, rows=97, total=97, distance=0.01),
    # A student that is nearly sure of its token. A power of two scales without rounding, which
    # beside logits of 100 would be the largest error.
    Case(name="sure", tokens=20, hidden=8, rows=97, total=97, temperature=0.125),
    Case(name="top_k", tokens=20, hidden=8, rows=97, total=90, top_k=5),
    Case(name="reverse", tokens=20, hidden=8, rows=97, total=90, divergence="reverse"),
    Case(name="reverse_pair", tokens=20, hidden=8, rows=97, total=90, divergence="reverse",
         contrast=("pair", 1, 2, 3), frozen_teacher=True),
    Case(name="reverse_fixed", tokens=20, hidden=8, rows=97, total=90, divergence="reverse",
         contrast=("fixed", 1, None, 2), contexts=3, softcap=3.0),
    Case(name="reverse_negatives", tokens=20, hidden=8, rows=97, total=90, divergence="reverse",
         contrast=("fec", 1, (2, 4), 3), contexts=5, top_k=7),
)  # fmt: skip
