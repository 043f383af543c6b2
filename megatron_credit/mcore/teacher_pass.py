"""A pass of its own over the teachers' views: for a model with other weights, or before training.

What it found is kept with the plain micro-batches until their own pass: a hidden state for each
response token and teacher's view of this rank. In return the teachers may have weights of their
own, and a pass that trains goes over the plain views alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor

from megatron_credit.batch.sequence import TrainSequence
from megatron_credit.batch.view_packing import Exchange, PackedViews, TeacherRows, ViewPacker
from megatron_credit.batch.views import View, Views
from megatron_credit.mcore.batching import Batching
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


@dataclass(frozen=True, eq=False)
class ViewReading:
    """What the teachers made of these rollouts' views, until the policy's next optimizer step.

    Kept on the last stage alone: bytes = hidden size x bytes of a number x (views of teachers x
    response tokens of this data and context rank), less what rollouts share. The rest is shared
    with the model.
    """

    views: Sequence[Views]
    rows: Sequence[TeacherRows | None]
    """Of each micro-batch of this rank; None where it is not on the last stage."""
    exchanges: Sequence[Exchange]
    """Of each micro-batch, how the rows came to those of the plain views."""
    num_steps: int
    """Optimizer steps of the policy before it."""

    @classmethod
    def of(cls, views: Sequence[Views], plain: Sequence[PackedViews], num_steps: int) -> Self:
        """From the plain micro-batches with what was read of the teachers."""
        rows = [batch.teacher_rows for batch in plain]
        return cls(list(views), rows, [batch.exchange for batch in plain], num_steps)

    def attached(
        self, packer: ViewPacker, batching: Batching, num_steps: int, *, trains: bool = False
    ) -> list[PackedViews]:
        """The plain micro-batches of the packer, each with what was read of its teachers.

        `trains`: they go through a backward pass.

        ValueError for other token ids than were read, or after an optimizer step of the policy.
        """
        if num_steps != self.num_steps:
            raise ValueError(
                f"the views were read after {self.num_steps} optimizer steps and the policy has "
                f"taken {num_steps}; read them again"
            )
        pairs = zip(packer.views, self.views, strict=False)
        if len(packer.views) != len(self.views) or not all(_same_ids(*pair) for pair in pairs):
            raise ValueError(
                "the reading is of other views than these; give the list that was read, of which "
                "only what is not token ids may have changed"
            )
        plain = batching.plain_batches(packer, self.exchanges, trains=trains)
        return [replace(one, teacher_rows=row) for one, row in zip(plain, self.rows, strict=True)]


_Read = TrainSequence | View | None


def _same_ids(one: Views, other: Views) -> bool:
    if one.num_contexts != other.num_contexts:
        return False
    pairs = zip((one.plain, *one.teachers), (other.plain, *other.teachers), strict=True)
    return all(_same_view(*pair) for pair in pairs)


def _same_view(one: _Read, other: _Read) -> bool:
    if one is None or other is None:
        return one is other
    if one.num_prompt != other.num_prompt:
        return False
    ids, other_ids = one.token_ids_L, other.token_ids_L
    # As a rule they are those that were read.
    return ids is other_ids or torch.equal(ids, other_ids)


def check_teacher(teacher: Sequence[GPTModel], policy: Sequence[GPTModel]) -> None:
    """ValueError where the hidden states of a teacher cannot stand beside those of the policy."""
    theirs, ours = (
        (chunks[0].config.hidden_size, chunks[0].vocab_size) for chunks in (teacher, policy)
    )
    if theirs != ours:
        raise ValueError(
            f"the teacher has hidden size {theirs[0]} and {theirs[1]} rows in its output weight, "
            f"the policy {ours[0]} and {ours[1]}; views are compared by models that share both. "
            "Log-probs of any model with the same tokens: TeacherModel.score"
        )
