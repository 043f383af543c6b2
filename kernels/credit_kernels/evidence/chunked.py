"""The `torch` backend: a few rows over all columns at a time, and tile by tile backward.

Between the passes it holds the normalisers of each token in every context, alpha and two sums.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from credit_kernels.evidence import units
from credit_kernels.evidence.contrast import Options
from credit_kernels.evidence.moments import EvidenceStats, finished_stats
from credit_kernels.evidence.passes import (
    local_moments,
    log_tilted_mass,
    moments_and_units,
    whole_block_of,
)
from credit_kernels.evidence.support import with_support
from credit_kernels.evidence.views import Views
from credit_kernels.logprob.chunked import gradients
from credit_kernels.vocab_parallel import LocalStats, reduce


def evidence_stats_chunked(
    hidden_CTH: Tensor,
    weight_VH: Tensor,
    teacher_weight_VH: Tensor | None,
    target_T: Tensor,
    options: Options,
) -> EvidenceStats:
    """See `evidence_stats`."""
    views, row_R = Views.of(hidden_CTH, weight_VH, teacher_weight_VH, target_T, options)
    local = local_moments(with_support(views), with_kl=True, with_loss=False)
    moments = reduce(local, options.shard.group)
    return finished_stats(moments, options.contrast, row_R, len(target_T))


class EvidenceLoss(torch.autograd.Function):
    """See `evidence_loss`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_CTH: Tensor,
        weight_VH: Tensor,
        teacher_weight_VH: Tensor | None,
        target_T: Tensor,
        controller_T: Tensor,
        options: Options,
    ) -> tuple[Tensor, Tensor]:
        """Losses of the rows that are not ignored, scattered back to all rows."""
        views, row_R = Views.of(hidden_CTH, weight_VH, teacher_weight_VH, target_T, options)
        views = with_support(views)
        unit_URH = None
        if options.keeps_units:
            moments, unit_URH = moments_and_units(views)
        else:
            local = local_moments(views, with_kl=False, with_loss=True)
            moments = reduce(local, options.shard.group)
        sums, softmax = moments.contrast, moments.softmax[: len(views.heads)]
        assert sums is not None
        controller_R, alpha_R = controller_T[row_R].to(softmax.max_T.dtype), sums.alpha_T()
        evidence_R = controller_R * sums.evidence_T(alpha_R)
        if options.divergence == "reverse":
            evidence_R = evidence_R + log_tilted_mass(
                views, softmax, alpha_R.to(controller_R), controller_R
            )
        ctx.options = options
        ctx.save_for_backward(
            hidden_CTH,
            weight_VH,
            teacher_weight_VH,
            target_T,
            row_R,
            unit_URH,
            views.threshold_JR,
            controller_R,
            alpha_R.to(controller_R),
            sums.offsets_2T(alpha_R).to(controller_R),
            *softmax.tensors,
        )
        loss_2R = torch.stack([sums.reference_T, evidence_R]).to(controller_R)
        loss_2T = loss_2R.new_zeros(2, len(target_T)).index_copy_(1, row_R, loss_2R)
        return loss_2T[0], loss_2T[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_reference_T: Tensor, grad_evidence_T: Tensor) -> tuple:
        """Gradients of the student's hidden states and of the weight through them."""
        *inputs, row_R, unit_URH, threshold_JR, controller_R, alpha_R, offset_2R = (
            ctx.saved_tensors[:10]
        )
        grad_2R = torch.stack([grad_reference_T[row_R], grad_evidence_T[row_R] * controller_R])
        if unit_URH is not None:
            grad_RH, grad_VH = units.scaled(unit_URH, grad_2R).to(inputs[0].dtype), None
        else:
            views, _ = Views.of(*inputs, ctx.options)
            incoming = Incoming(
                softmax=LocalStats(*ctx.saved_tensors[10:]),
                alpha_R=alpha_R,
                offset_2R=offset_2R,
                grad_2R=grad_2R,
            )
            product_gradient = partial(
                _product_gradient, replace(views, threshold_JR=threshold_JR), incoming
            )
            wanted = ctx.needs_input_grad[:2]
            grad_RH, grad_VH = gradients(views.heads[0], product_gradient, *wanted)
        grad_CTH = None
        if grad_RH is not None:
            grad_CTH = torch.zeros_like(inputs[0])
            grad_CTH[0].index_copy_(0, row_R, grad_RH)
        return grad_CTH, grad_VH, None, None, None, None


@dataclass(frozen=True, eq=False)
class Incoming:
    """What the backward pass knows of each row, from the forward pass and from behind."""

    softmax: LocalStats
    """Of the contexts, over the whole vocabulary."""
    alpha_R: Tensor
    offset_2R: Tensor
    grad_2R: Tensor
    """Of the reference, and of the evidence times the controller."""


def _product_gradient(
    views: Views, incoming: Incoming, rows: slice, columns: slice, weight_NH: Tensor
) -> Tensor:
    """Gradient of the student's scaled @ weight.T in one tile, whose logits are made again."""
    contrast = views.options.contrast
    assert contrast is not None
    weights = views.weights(columns, weight_NH)
    tiles = [
        head.logits(rows, context_NH) for head, context_NH in zip(views.heads, weights, strict=True)
    ]
    cap_slope_RN = views.heads[0].cap_slope(tiles[0])
    block = whole_block_of(views, rows, columns, torch.stack(tiles), incoming.softmax[:, rows])
    grad_RN = units.LOGIT_GRADIENTS[views.options.divergence](
        block,
        contrast,
        incoming.alpha_R[rows],
        incoming.offset_2R[:, rows],
        incoming.grad_2R[:, rows],
    )
    return grad_RN if cap_slope_RN is None else grad_RN.mul_(cap_slope_RN)
