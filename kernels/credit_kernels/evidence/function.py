"""Both evidence operations around the programs of a Triton backend.

Between the passes the loss holds the normalisers of each token in every context, alpha, two sums
and what the programs need beforehand.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from credit_kernels.evidence import units
from credit_kernels.evidence.contrast import Contrast, Options
from credit_kernels.evidence.moments import EvidenceStats, Moments, finished_stats, log_mass
from credit_kernels.evidence.operands import Contexts, chosen_for_loss
from credit_kernels.evidence.plan import Plan
from credit_kernels.vocab_parallel import LocalStats, reduce


@dataclass(frozen=True)
class Backend:
    """How the sums over this rank's columns, and the gradients, are computed."""

    prepared: Callable[[Contexts], Contexts]
    """With the numbers that the programs need beforehand; ValueError if it cannot serve them."""
    local_moments: Callable[[Contexts, Plan], Moments]
    """The statistics over this rank's columns."""
    tilted: Callable[[Contexts, Plan], LocalStats]
    """Softmax over the support of a sum of coefficient times log-prob."""
    gradients: Callable[[Contexts, Plan, bool, bool], tuple[Tensor | None, Tensor | None]]
    """(contexts, plan, wants_hidden, wants_weight) -> gradients of student's rows and of weight."""
    moments_and_units: Callable[[Contexts, Plan], tuple[Moments, Tensor]] | None = None
    """The same moments of the loss, bit for bit, and its [U, R, H] float32 `units`, of a head whose
    columns are all here. None: no logit is left when its normaliser is known."""


def evidence_stats_fused(
    hidden_CTH: Tensor,
    weight_VH: Tensor,
    teacher_weight_VH: Tensor | None,
    target_T: Tensor,
    options: Options,
    backend: Backend,
) -> EvidenceStats:
    """See `evidence_stats`."""
    everyone = tuple(range(len(hidden_CTH)))
    contexts, row_R = Contexts.of(
        hidden_CTH, weight_VH, teacher_weight_VH, target_T, options, everyone
    )
    contexts = backend.prepared(contexts)
    plan = Plan.of(contexts.options, len(everyone), kl=True, loss=False)
    moments = reduce(backend.local_moments(contexts, plan), options.shard.group)
    return finished_stats(moments, options.contrast, row_R, len(target_T))


class FusedEvidenceLoss(torch.autograd.Function):
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
        backend: Backend,
    ) -> tuple[Tensor, Tensor]:
        """Losses of the rows that are not ignored, scattered back to all rows."""
        assert options.contrast is not None
        inputs = (hidden_CTH, weight_VH, teacher_weight_VH, target_T)
        contexts, row_R = Contexts.of(*inputs, options, chosen_for_loss(options.contrast))
        contexts = backend.prepared(contexts)
        plan = Plan.of(contexts.options, len(contexts.hidden_CRH), kl=False, loss=True)
        unit_URH = None
        if options.keeps_units and backend.moments_and_units is not None:
            moments, unit_URH = backend.moments_and_units(contexts, plan)
        else:
            moments = reduce(backend.local_moments(contexts, plan), options.shard.group)
        sums, contrast = moments.contrast, contexts.options.contrast
        assert sums is not None and contrast is not None
        alpha_R, controller_R = sums.alpha_T(), controller_T[row_R].float()
        softmax = moments.softmax
        contexts = contexts.with_numbers(softmax.max_T, softmax.sum_T)
        evidence_R = controller_R * sums.evidence_T(alpha_R)
        if plan.reverse:
            coefficient_QR = tilting(contrast, plan, alpha_R, controller_R)
            local = backend.tilted(contexts.with_numbers(coefficient_QR), plan)
            evidence_R = evidence_R + log_mass(reduce(local, options.shard.group))
        ctx.settings = (options, backend, plan)
        ctx.save_for_backward(
            *inputs,
            row_R,
            unit_URH,
            contexts.number_NR,
            controller_R,
            alpha_R,
            sums.offsets_2T(alpha_R).float(),
        )
        loss_2R = torch.stack([sums.reference_T, evidence_R]).float()
        loss_2T = loss_2R.new_zeros(2, len(target_T)).index_copy_(1, row_R, loss_2R)
        return loss_2T[0], loss_2T[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_reference_T: Tensor, grad_evidence_T: Tensor) -> tuple:
        """Gradients of the student's hidden states and of the weight through them."""
        *inputs, row_R, unit_URH, number_NR, controller_R, alpha_R, offset_2R = ctx.saved_tensors
        options, backend, plan = ctx.settings
        grad_2R = torch.stack([grad_reference_T[row_R], grad_evidence_T[row_R] * controller_R])
        if unit_URH is not None:
            grad_RH, grad_VH = units.scaled(unit_URH, grad_2R).to(inputs[0].dtype), None
        else:
            contexts, _ = Contexts.of(*inputs, options, chosen_for_loss(options.contrast))
            contexts = replace(contexts, number_NR=number_NR)
            coefficient_QR = coefficients(
                contexts.options.contrast, plan, alpha_R.float(), offset_2R, grad_2R
            )
            contexts = contexts.with_numbers(coefficient_QR / options.temperature)
            grad_RH, grad_VH = backend.gradients(contexts, plan, *ctx.needs_input_grad[:2])
        grad_CTH = None
        if grad_RH is not None:
            grad_CTH = torch.zeros_like(inputs[0])
            grad_CTH[0].index_copy_(0, row_R, grad_RH)
        return grad_CTH, grad_VH, None, None, None, None, None


def tilting(contrast: Contrast, plan: Plan, alpha_R: Tensor, controller_R: Tensor) -> Tensor:
    """[slots, R]: log q_b + w r as a sum of coefficient times log-prob."""
    coefficient_PR = controller_R.new_zeros(plan.slots, len(alpha_R))
    coefficient_PR[plan.negative] += 1.0
    of_role_JR = contrast.coefficients(alpha_R.float()) * controller_R
    for role, of_role_R in zip(contrast.roles(plan.contexts), of_role_JR, strict=True):
        coefficient_PR[role] += of_role_R
    return coefficient_PR


def coefficients(
    contrast: Contrast, plan: Plan, alpha_R: Tensor, offset_2R: Tensor, incoming_2R: Tensor
) -> Tensor:
    """[slots + 2, R]: the gradient of the student's logits, with p a part of it on all columns.

    forward: sum over the slots of coefficient q, on the support, + own p. reverse: p (own + the sum
    of coefficient log q + constant, on the support). The two last rows are own and constant; see
    `forward.logit_gradient` and `reverse.logit_gradient`.
    """
    coefficient_PR = incoming_2R.new_zeros(plan.slots, len(alpha_R))
    of_role_JR = -incoming_2R[1] * contrast.coefficients(alpha_R)
    for role, of_role_R in zip(contrast.roles(plan.contexts), of_role_JR, strict=True):
        coefficient_PR[role] += of_role_R
    coefficient_PR[plan.free] -= incoming_2R[0]
    own_R = (incoming_2R * offset_2R).sum(0)
    constant_R = torch.zeros_like(own_R)
    if plan.reverse:
        coefficient_PR[0] += incoming_2R[0]
        if plan.support:
            own_R, constant_R = own_R - incoming_2R[0], incoming_2R[0]
    return torch.cat([coefficient_PR, own_R[None], constant_R[None]])
