"""The losses between the plain view of each rollout and its evidence, for a pass that trains.

The gradient reaches the plain views alone. Where all views share a micro-batch, megatron's backward
pass goes over the rows of the others too, with zeros; behind `teacher_pass` there are none.

Shape letters: those of `batch.view_packing`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from credit_kernels import evidence_loss
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor

from megatron_credit.batch.view_packing import PackedViews, RowGroup
from megatron_credit.mcore.forward import output_weight_of
from megatron_credit.mcore.views import ViewHead, teacher_weight


@dataclass(frozen=True, eq=False)
class EvidenceHead(ViewHead):
    """Scores of the plain rows and, for each, the losses that draw it towards its evidence."""

    controller_T: Tensor
    """float32: w of every response token, in the order of `PackedBatch.slot_P`."""

    def __call__(
        self,
        *,
        hidden_states: Tensor,
        output_layer: ColumnParallelLinear,
        output_weight: Tensor | None,
        context: PackedViews,
        **_unused: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(logprob_R, entropy_R, reference_R, evidence_R), differentiable through the plain view.

        See `credit_kernels.evidence_loss`; megatron's `output_processor` hook. Where a view is
        absent the losses that need it are 0.
        """
        weight_VH = output_weight_of(output_layer, output_weight)
        hidden_PH = self.output.gathered(hidden_states)
        plain_RH = self.output.rows(hidden_PH, context.row_R)
        logprob_R, entropy_R = self.output.scores(plain_RH, weight_VH, context)
        loss_2R = logprob_R.new_zeros(2, len(logprob_R))
        for group, hidden_CTH in self.groups(hidden_PH, plain_RH, context):
            loss_2T = self._losses(group, hidden_CTH, weight_VH, context)
            if loss_2T is not None:
                loss_2R = loss_2R.index_copy(1, group.row_T, loss_2T)
        return logprob_R, entropy_R, *loss_2R

    def _losses(
        self, group: RowGroup, hidden_CTH: Tensor, weight_VH: Tensor, batch: PackedViews
    ) -> Tensor | None:
        """[2, T]: reference and evidence of a group; None where it lacks what both need."""
        at_T = batch.row_R[group.row_T]
        evident = self.comparison.within(group.contexts)
        contrast = evident or self.comparison.free_alone(group.contexts)
        if contrast is None:
            return None
        reference_T, evidence_T = evidence_loss(
            hidden_CTH,
            weight_VH,
            batch.target_P[at_T],
            self.controller_T[batch.slot_P[at_T]],
            contrast=contrast,
            temperature=self.output.temperature,
            shard=self.output.shard(len(weight_VH)),
            teacher_weight_VH=teacher_weight(batch),
            divergence=self.comparison.divergence,
            top_k=self.comparison.top_k,
        )
        if evident is None:
            evidence_T = torch.zeros_like(evidence_T)
        return torch.stack([reference_T, evidence_T])
