"""Gradients of the losses in the student's hidden states, where the forward pass makes them.

A unit is the gradient of one loss of a token, without what comes in, and of the evidence without
the controller: p sum q0 - q0 and p sum d - d in the student's logits, for the reverse divergence
p (log p / q0 - KL) and p (E_p[r] - r). They follow from the statistics of the whole vocabulary; U
counts them, the evidence's last.
"""

import torch
from torch import Tensor

from credit_kernels.evidence import forward, reverse
from credit_kernels.evidence.block import Block
from credit_kernels.evidence.contrast import Options
from credit_kernels.evidence.sums import ContrastSums

LOGIT_GRADIENTS = {"forward": forward.logit_gradient, "reverse": reverse.logit_gradient}


def pay(hidden_CTH: Tensor, weight_VH: Tensor, options: Options) -> bool:
    """The units, scaled by what comes in, will be all that the backward pass is asked.

    As `unit_pays` of linear_logprob. They take the place of the logits of as many contexts.
    """
    wanted = torch.is_grad_enabled() and hidden_CTH.requires_grad and not weight_VH.requires_grad
    return wanted and options.shard.group is None and len(hidden_CTH) > 1


def count(options: Options) -> int:
    """1 where the reference is the student's own distribution on all columns: its gradient is 0."""
    contrast = options.contrast
    assert contrast is not None
    return 1 if contrast.free == 0 and options.top_k is None else 2


def incoming(options: Options, like_R: Tensor) -> Tensor:
    """[U, 2, R]: what each unit takes of the reference's gradient and of the evidence's."""
    one_22 = torch.eye(2, dtype=like_R.dtype, device=like_R.device)[-count(options) :]
    return one_22[..., None].expand(-1, -1, len(like_R))


def scaled(unit_URH: Tensor, grad_2R: Tensor) -> Tensor:
    """[R, H]: the gradient, from those of the reference and of the evidence times controller."""
    total_RH = torch.zeros_like(unit_URH[0])
    for unit_RH, grad_R in zip(unit_URH, grad_2R[-len(unit_URH) :], strict=True):
        total_RH.addcmul_(unit_RH, grad_R[:, None])
    return total_RH


def logit_gradients(block: Block, sums: ContrastSums, options: Options) -> list[Tensor]:
    """[R, V] for each unit: of the student's logits in rows whose columns are all here."""
    alpha_R, like_R = sums.alpha_T(), block.prob_PRV[0, :, 0]
    offset_2R = sums.offsets_2T(alpha_R).to(like_R)
    return [
        LOGIT_GRADIENTS[options.divergence](
            block, sums.contrast, alpha_R.to(like_R), offset_2R, incoming_2R
        )
        for incoming_2R in incoming(options, like_R)
    ]
