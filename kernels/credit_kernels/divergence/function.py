"""Autograd of divergence_loss, around what is known of the rows over all columns or a support."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from credit_kernels.divergence.events import Events
from credit_kernels.divergence.whole import Whole
from credit_kernels.evidence.contrast import Options
from credit_kernels.evidence.views import Views
from credit_kernels.logprob.chunked import gradients
from credit_kernels.logprob.head import Head
from credit_kernels.vocab_parallel import VocabShard


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is computed, apart from the tensors."""

    beta: float
    top_k: int | None
    """Below the number of columns; None: all columns."""
    temperature: float
    softcap: float | None
    shard: VocabShard


class DivergenceLoss(torch.autograd.Function):
    """See `divergence_loss`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        teacher_hidden_TH: Tensor,
        teacher_weight_VH: Tensor | None,
        target_T: Tensor,
        settings: Settings,
    ) -> Tensor:
        """Divergences of the rows that are not ignored, scattered back to all rows."""
        row_R = ((target_T >= 0) & (target_T < settings.shard.total)).nonzero()[:, 0]
        inputs = (hidden_TH, weight_VH, teacher_hidden_TH, teacher_weight_VH, target_T, row_R)
        views = views_of(*inputs, settings)
        if settings.top_k is None:
            divergence_R, known = Whole.of(views, settings.beta)
        else:
            divergence_R, known = Events.of(views, settings.beta, settings.top_k)
        ctx.settings = settings
        ctx.save_for_backward(*inputs, *known.tensors)
        divergence_R = divergence_R.to(views.heads[0].scaled_RH.dtype)
        return divergence_R.new_zeros(len(target_T)).index_copy_(0, row_R, divergence_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple:
        """Gradients of the student's hidden states and of the weight through them."""
        settings, (*inputs, row_R) = ctx.settings, ctx.saved_tensors[:6]
        known = (Whole if settings.top_k is None else Events)(*ctx.saved_tensors[6:])
        views = views_of(*inputs, row_R, settings)
        product_gradient = partial(known.product_gradient, views, settings.beta, grad_T[row_R])
        grad_RH, grad_VH = gradients(views.heads[0], product_gradient, *ctx.needs_input_grad[:2])
        grad_TH = None
        if grad_RH is not None:
            grad_TH = torch.zeros_like(inputs[0]).index_copy_(0, row_R, grad_RH)
        return grad_TH, grad_VH, None, None, None, None


def views_of(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    teacher_hidden_TH: Tensor,
    teacher_weight_VH: Tensor | None,
    target_T: Tensor,
    row_R: Tensor,
    settings: Settings,
) -> Views:
    """Student and teacher on the rows that count."""
    shard, scale = settings.shard, (settings.temperature, settings.softcap)
    heads = tuple(
        Head.of(one_TH, weight_VH, row_R, shard, *scale)
        for one_TH in (hidden_TH, teacher_hidden_TH)
    )
    options = Options(None, "forward", None, *scale, shard)
    return Views(heads, target_T[row_R], teacher_weight_VH, options)
