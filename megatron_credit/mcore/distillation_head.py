"""The divergence of the plain view of each rollout from its teacher's, for a pass that trains.

Context 1 is the teacher's view; others are ignored. The gradient reaches the plain views alone, as
with `EvidenceHead`.

Shape letters: those of `batch.view_packing`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from credit_kernels import divergence_loss
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor

from megatron_credit.batch.view_packing import PackedViews
from megatron_credit.mcore.forward import output_weight_of
from megatron_credit.mcore.views import ViewHead, teacher_weight

TEACHER = 1
"""The context that the student is drawn towards."""


@dataclass(frozen=True, eq=False)
class DistillationHead(ViewHead):
    """Scores of the plain rows and, for each, its divergence from the teacher."""

    beta: float = 0.5
    """0: KL(teacher || student), 1: KL(student || teacher), between them: generalised JSD."""
    top_k: int | None = None
    """Tokens of the student that are told apart; None: the whole vocabulary."""

    def __post_init__(self) -> None:
        # What the kernels refuse, on every rank: later, some would wait for the others.
        nothing_TH, nothing_T = torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64)
        divergence_loss(
            nothing_TH,
            nothing_TH,
            torch.zeros(1, 1),
            nothing_T,
            beta=self.beta,
            top_k=self.top_k,
            temperature=self.output.temperature,
        )

    def __call__(
        self,
        *,
        hidden_states: Tensor,
        output_layer: ColumnParallelLinear,
        output_weight: Tensor | None,
        context: PackedViews,
        **_unused: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(logprob_R, entropy_R, divergence_R), differentiable through the plain view.

        See `credit_kernels.divergence_loss`; megatron's `output_processor` hook. Where the
        teacher's view is absent the divergence is 0.
        """
        weight_VH = output_weight_of(output_layer, output_weight)
        hidden_PH = self.output.gathered(hidden_states)
        plain_RH = self.output.rows(hidden_PH, context.row_R)
        logprob_R, entropy_R = self.output.scores(plain_RH, weight_VH, context)
        divergence_R = torch.zeros_like(logprob_R)
        for group, hidden_CTH in self.groups(hidden_PH, plain_RH, context):
            if TEACHER not in group.contexts:
                continue
            divergence_T = divergence_loss(
                hidden_CTH[0],
                hidden_CTH[group.contexts.index(TEACHER)],
                weight_VH,
                context.target_P[context.row_R[group.row_T]],
                beta=self.beta,
                top_k=self.top_k,
                temperature=self.output.temperature,
                shard=self.output.shard(len(weight_VH)),
                teacher_weight_VH=teacher_weight(context),
            )
            divergence_R = divergence_R.index_copy(0, group.row_T, divergence_T)
        return logprob_R, entropy_R, divergence_R
