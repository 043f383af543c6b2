"""The pass of an optimizer step: its micro-batches, its head, and the losses that are summed.

Shape letters: those of `batch.view_packing`; F all response tokens of the step, in the order of
`PackedBatch.slot_P`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_credit.batch.packing import PackedBatch, Packer
from megatron_credit.batch.teaching import DistillationTeaching, EvidenceTeaching, Teaching
from megatron_credit.batch.views import Views, count_contexts
from megatron_credit.mcore.comparison import Comparison
from megatron_credit.mcore.distillation_head import TEACHER, DistillationHead
from megatron_credit.mcore.evidence_head import EvidenceHead
from megatron_credit.mcore.forward import Head, OutputHead, run_schedule, token_inputs
from megatron_credit.mcore.parallel import Ranks
from megatron_credit.mcore.scoring import TokenScores
from megatron_credit.mcore.totals import global_totals, named_metrics
from megatron_credit.objective.config import ObjectiveConfig
from megatron_credit.objective.loss import LossSums, policy_loss
from megatron_credit.objective.ratio import masked


@dataclass(frozen=True, kw_only=True, eq=False)
class Term:
    """A loss of its own beside the surrogate, as the micro-batches see it."""

    name: str
    coefficient: float
    count: int
    """Tokens of the whole step; at least 1."""
    place: int
    """Which of the head's losses."""
    mask_F: Tensor

    def total(self, batch: PackedBatch, losses: Sequence[Tensor]) -> Tensor:
        """Scalar with gradient: sum over this micro-batch's tokens, not divided by anything."""
        mask_R = self.mask_F[batch.slot_P[batch.row_R]]
        return masked(losses[self.place], mask_R).sum()

    def share(self, total: Tensor) -> Tensor:
        """What such a sum adds to the loss of the step."""
        return self.coefficient * total / self.count


@dataclass(frozen=True, eq=False)
class TrainingPass:
    """What goes through the pipeline in an optimizer step, and what is made of it."""

    packer: Packer
    batches: Sequence[PackedBatch]
    head: Head
    """(logprob_R, entropy_R) and, where a loss of the teaching is active, its losses."""
    objective: ObjectiveConfig
    count: float
    """What the weighted surrogate is divided by."""
    teaching: Teaching | None

    def run(
        self, chunks: Sequence[torch.nn.Module], scores: TokenScores, device: torch.device
    ) -> list[LossSums]:
        """Gradients of the step's loss; the sums of each micro-batch, and the scores are filled."""

        def loss(
            batch: PackedBatch, logprob_R: Tensor, entropy_R: Tensor, *losses: Tensor
        ) -> tuple[Tensor, LossSums]:
            scores.keep(batch, logprob_R, entropy_R)
            part = policy_loss(token_inputs(batch, logprob_R, entropy_R), self.objective)
            # Each loss is divided once; gradients and losses are plain sums from here on.
            whole, taught = part.loss / self.count, {}
            for term in terms:
                total = term.total(batch, losses)
                whole = whole + term.share(total)
                taught[term.name] = total.detach()
            return whole, replace(part, loss=part.loss.detach(), taught=taught)

        terms = self._terms(device)
        return run_schedule(chunks, self.batches, self.head, loss, forward_only=False)

    def metrics(
        self, parts: Sequence[LossSums], ranks: Ranks, device: torch.device
    ) -> dict[str, float]:
        """Of the whole step, on every rank; see `totals`. Collective as `global_totals` is.

        Of each loss beside the surrogate the mean, without its coefficient, and how many tokens it
        is over.
        """
        losses = () if self.teaching is None else self.teaching.added
        names = [one.name for one in losses if one.is_active]
        totals = global_totals(parts, self.objective, ranks, device, taught=names)
        metrics = named_metrics(totals, count=self.count)
        for one in losses:
            mean = totals.taught.get(one.name, 0.0) / max(one.count, 1)
            metrics["loss"] += one.coefficient * mean
            metrics[f"policy/loss_{one.name}"] = mean
            metrics[f"policy/tokens_{one.name}"] = float(one.count)
        return metrics

    def _terms(self, device: torch.device) -> list[Term]:
        """The losses of the teaching that can change anything."""
        if self.teaching is None:
            return []
        return [
            Term(
                name=one.name,
                coefficient=one.coefficient,
                count=one.count,
                place=self.teaching.FOUND.index(one.name),
                mask_F=torch.cat([*one.mask]).to(device),
            )
            for one in self.teaching.losses
            if one.is_active
        ]


def head_of(teaching: Teaching, output: OutputHead, ranks: Ranks, device: torch.device) -> Head:
    """What finds the teaching's losses of each row.

    ValueError, on every rank, for what it cannot compute: a contrast of contexts that are not
    there, or a masked token of a rollout that lacks a view.
    """
    comparison = comparison_of(teaching)
    comparison.check(output.temperature)
    _check_present(teaching, comparison)
    if isinstance(teaching, EvidenceTeaching):
        controller_F = torch.cat([*teaching.controller]).to(device)
        return EvidenceHead(output, comparison, ranks.cp_group, controller_T=controller_F)
    assert isinstance(teaching, DistillationTeaching)
    return DistillationHead(
        output, comparison, ranks.cp_group, beta=teaching.beta, top_k=teaching.top_k
    )


def comparison_of(teaching: Teaching) -> Comparison:
    """What the teaching computes of its contexts."""
    num_contexts = count_contexts(teaching.views)
    if isinstance(teaching, EvidenceTeaching):
        return Comparison(num_contexts, teaching.contrast, teaching.divergence, teaching.top_k)
    return Comparison(num_contexts)


def _check_present(teaching: Teaching, comparison: Comparison) -> None:
    """A loss of an absent view would be 0 and yet count in its mean."""
    for one in teaching.losses:
        for number, (mask_T, views) in enumerate(zip(one.mask, teaching.views, strict=True)):
            if mask_T.any() and not _has_views(one.name, views, comparison):
                raise ValueError(
                    f"mask of {one.name!r}, sequence {number}: the rollout lacks a view that this "
                    "loss needs; leave its tokens out of the mask"
                )


def _has_views(name: str, views: Views, comparison: Comparison) -> bool:
    teachers = enumerate(views.teachers, start=1)
    present = (0, *(context for context, view in teachers if view is not None))
    if name == "evidence":
        return comparison.within(present) is not None
    if name == "reference":
        return comparison.free_alone(present) is not None
    return TEACHER in present
