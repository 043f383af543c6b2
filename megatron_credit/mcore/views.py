"""One pass over several views of each rollout, which gives the statistics of all contexts.

All views of a rollout are in one micro-batch, unless `teacher_pass` has read those of the teachers.
Behind the last layer the hidden states that predict the same token are brought together, and the
output weight is read once for all contexts (`credit_kernels`); once for each set of contexts that
occurs, where some rollouts lack some.

What moves: under sequence parallelism one all-gather of a micro-batch's hidden states over the
tensor ranks, as in scoring; under context parallelism one all-to-all in the type of the model, of
the teachers' response rows that are not on the rank of their plain row. On average that is
(C - 1)(size - 1) / size rows a token.

Shape letters: those of `batch.view_packing`; S also counts numbers of a token.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from credit_kernels import EvidenceStats, evidence_stats
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor

from megatron_credit.batch.sequence import check_token_ids
from megatron_credit.batch.view_packing import (
    Exchange,
    PackedViews,
    RowGroup,
    ViewPacker,
)
from megatron_credit.batch.views import Views, ViewScores
from megatron_credit.mcore.architecture import Architecture
from megatron_credit.mcore.comparison import COMPARED, Comparison
from megatron_credit.mcore.forward import OutputHead, output_weight_of, run_schedule
from megatron_credit.mcore.parallel import Ranks
from megatron_credit.mcore.scoring import TokenValues


@dataclass(frozen=True, eq=False)
class ViewHead:
    """The output head of views: what those for statistics and for losses share."""

    output: OutputHead
    comparison: Comparison
    cp_group: dist.ProcessGroup

    def groups(
        self, hidden_PH: Tensor, plain_RH: Tensor, batch: PackedViews
    ) -> Iterator[tuple[RowGroup, Tensor]]:
        """Groups of plain rows with [C, T, H], their hidden states in each of their contexts."""
        if batch.teacher_rows is None:
            received_SH = exchanged(hidden_PH, batch.exchange, self.cp_group)
        else:
            received_SH = batch.teacher_rows.received_SH
        for group in batch.exchange.groups:
            plain_1TH = plain_RH[group.row_T][None]
            yield group, torch.cat([plain_1TH, received_SH[group.received_CT]])


def teacher_weight(batch: PackedViews) -> Tensor | None:
    """[V, H]: the output weight of the teachers; None: that of the plain view."""
    return None if batch.teacher_rows is None else batch.teacher_rows.weight_VH


def exchanged(hidden_PH: Tensor, exchange: Exchange, group: dist.ProcessGroup) -> Tensor:
    """[S, H]: the teachers' rows that this rank's plain rows need, without their gradient."""
    sent_SH = hidden_PH.detach()[exchange.sent_S]
    if group.size() == 1:
        return sent_SH
    received_SH = sent_SH.new_empty(sum(exchange.received_sizes), sent_SH.shape[1])
    sizes = list(exchange.received_sizes), list(exchange.sent_sizes)
    dist.all_to_all_single(received_SH, sent_SH, *sizes, group=group)
    return received_SH


@dataclass(frozen=True, eq=False)
class StatisticsHead(ViewHead):
    """found_SR: every statistic of the plain rows, NaN where a context is absent; no gradient."""

    def __call__(
        self,
        *,
        hidden_states: Tensor,
        output_layer: ColumnParallelLinear,
        output_weight: Tensor | None,
        context: PackedViews,
        **_unused: Any,
    ) -> tuple[Tensor]:
        """megatron's `output_processor` hook."""
        weight_VH = output_weight_of(output_layer, output_weight)
        hidden_PH = self.output.gathered(hidden_states)
        plain_RH = self.output.rows(hidden_PH, context.row_R)
        target_R = context.target_R
        found_SR = target_R.new_full(
            (self.comparison.num_values, len(target_R)), math.nan, dtype=torch.float32
        )
        for group, hidden_CTH in self.groups(hidden_PH, plain_RH, context):
            contrast = self.comparison.within(group.contexts)
            stats = evidence_stats(
                hidden_CTH,
                weight_VH,
                target_R[group.row_T],
                contrast=contrast,
                temperature=self.output.temperature,
                shard=self.output.shard(len(weight_VH)),
                teacher_weight_VH=teacher_weight(context),
                divergence=self.comparison.divergence,
                top_k=None if contrast is None else self.comparison.top_k,
            )
            found_SR[:, group.row_T] = self._column(stats, group.contexts)
        return (found_SR,)

    def _column(self, stats: EvidenceStats, contexts: Sequence[int]) -> Tensor:
        """[S, T]: what was found of a group, each number in its place."""
        compared_KT = torch.cat(
            [
                stats.logprob_CT,
                stats.entropy_CT,
                stats.kl_teacher_student_CT,
                stats.kl_student_teacher_CT,
            ]
        )
        num_contexts = self.comparison.num_contexts
        place_K = [kind * num_contexts + c for kind in range(COMPARED) for c in contexts]
        found_ST = compared_KT.new_full(
            (self.comparison.num_values, compared_KT.shape[1]), math.nan
        )
        found_ST[place_K] = compared_KT
        contrasted = (stats.alpha_T, stats.target_T, stats.mean_T, stats.cost_T)
        if stats.alpha_T is not None:
            found_ST[COMPARED * num_contexts :] = torch.stack(contrasted)
        return found_ST


def score_views(
    chunks: Sequence[torch.nn.Module],
    packer: ViewPacker,
    batches: Sequence[PackedViews],
    head: StatisticsHead,
    ranks: Ranks,
) -> list[ViewScores]:
    """The statistics of all rollouts in input order, on every rank. Collective over the world."""
    device = batches[0].target_P.device
    values = TokenValues(head.comparison.num_values, packer.slots[-1], device)

    def collect(batch: PackedViews, found_SR: Tensor) -> tuple[Tensor, None]:
        values.keep(batch, found_SR)
        return found_SR.new_zeros(()), None

    run_schedule(chunks, batches, head, collect, forward_only=True)
    found_ST = values.gather(ranks)
    sizes = [one.plain.num_response for one in packer.views]
    return [_scores(part_ST, head.comparison) for part_ST in found_ST.split(sizes, 1)]


def check_views(views: Sequence[Views], architecture: Architecture) -> None:
    """ValueError where the model cannot take a view."""
    for number, one in enumerate(views):
        for context, view in enumerate([one.plain, *one.teachers]):
            if view is not None:
                _check_view(f"rollout {number}, context {context}", view.token_ids_L, architecture)


def _check_view(name: str, token_ids_L: Tensor, architecture: Architecture) -> None:
    check_token_ids(name, token_ids_L, architecture.vocab_size)
    if len(token_ids_L) > architecture.max_positions:
        raise ValueError(
            f"{name} has {len(token_ids_L)} tokens, the model {architecture.max_positions} "
            "positions; shorten the prompt, the evidence in it in its middle"
        )


def _scores(found_ST: Tensor, comparison: Comparison) -> ViewScores:
    first = COMPARED * comparison.num_contexts
    return ViewScores(*found_ST[:first].unflatten(0, (COMPARED, -1)), *found_ST[first:])
