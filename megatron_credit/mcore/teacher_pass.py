"""A pass of its own over the teachers' views: for a model with other weights, or before training.

What it found is kept with the plain micro-batches until their own pass: a hidden state for each
response token and teacher's view of this rank. In return the teachers may have weights of their
own, and a pass that trains goes over the plain views alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor

from megatron_credit.batch.view_packing import PackedViews, TeacherRows
from megatron_credit.mcore.forward import OutputHead, output_weight_of, run_schedule
from megatron_credit.mcore.views import exchanged


@dataclass(frozen=True, eq=False)
class TeacherHead:
    """(received_SH, weight_VH): the teachers' rows of this rank's plain rows, and their head."""

    output: OutputHead
    cp_group: dist.ProcessGroup

    def __call__(
        self,
        *,
        hidden_states: Tensor,
        output_layer: ColumnParallelLinear,
        output_weight: Tensor | None,
        context: PackedViews,
        **_unused: Any,
    ) -> tuple[Tensor, Tensor]:
        """megatron's `output_processor` hook."""
        hidden_PH = self.output.gathered(hidden_states)
        received_SH = exchanged(hidden_PH, context.exchange, self.cp_group)
        return received_SH, output_weight_of(output_layer, output_weight)


@torch.no_grad()
def read_teachers(
    chunks: Sequence[torch.nn.Module],
    batches: Sequence[tuple[PackedViews, PackedViews]],
    output: OutputHead,
    cp_group: dist.ProcessGroup,
) -> list[PackedViews]:
    """The plain micro-batches of these pairs, with what `chunks` make of their teachers' views."""

    def keep(
        _batch: PackedViews, received_SH: Tensor, weight_VH: Tensor
    ) -> tuple[Tensor, TeacherRows]:
        return received_SH.new_zeros(()), TeacherRows(received_SH, weight_VH)

    teachers = [of_teachers for _, of_teachers in batches]
    head = TeacherHead(output, cp_group)
    kept = run_schedule(chunks, teachers, head, keep, forward_only=True)
    plain = [of_plain for of_plain, _ in batches]
    if not kept:
        # Only the last stage finds rows, and needs them.
        return plain
    return [replace(one, teacher_rows=rows) for one, rows in zip(plain, kept, strict=True)]
