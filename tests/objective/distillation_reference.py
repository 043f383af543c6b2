"""The distillation loss of OPSD (2601.18734), SDPO (2601.20802) and SRPO (2604.02288) from
log-probs of the whole vocabulary: what the kernels are held against.

Further shape letters: V vocabulary, X events: tokens of the vocabulary, or K of them and the tail.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_LEAST_LOGPROB = -1e4
"""exp() of it is 0, and 0 times it is 0, which minus infinity would not give."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DistillationSums:
    """What a micro-batch adds to the distillation loss, which has a count of its own."""

    loss: Tensor
    """Scalar with gradient in the student: sum of the divergences in nats."""
    tokens: Tensor
    """int64 scalar: how many there are; the sum over the step divides the loss, once."""


def distillation_loss(
    student_logprob_TV: Tensor,
    teacher_logprob_TV: Tensor,
    mask_T: Tensor,
    *,
    beta: float = 0.5,
    top_k: int | None = None,
) -> DistillationSums:
    """Sum over the masked tokens of the generalised JSD between teacher and student.

    Log-probs are of the whole vocabulary, at the sampling temperature. With `top_k` only the
    student's most likely K tokens are told apart, and all others count as one event. What stands
    outside the mask is not read. No gradient reaches the teacher. ValueError for a top_k below 1
    or a beta outside 0 to 1.
    """
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k}; expected at least 1, or None for the whole vocabulary")
    student_TV = student_logprob_TV[mask_T]
    teacher_TV = teacher_logprob_TV[mask_T].detach()
    if top_k is not None and top_k < student_TV.shape[-1]:
        top_TK = student_TV.detach().topk(top_k, dim=-1).indices
        student_TV = with_tail(student_TV.gather(-1, top_TK))
        teacher_TV = with_tail(teacher_TV.gather(-1, top_TK))
    divergence_T = generalised_jsd(student_TV, teacher_TV, beta=beta)
    return DistillationSums(loss=divergence_T.sum(), tokens=mask_T.sum())


def with_tail(logprob_TK: Tensor) -> Tensor:
    """[T, K + 1]: log-probs of K tokens, and of all other tokens together."""
    total_T1 = _precise(logprob_TK).logsumexp(dim=-1, keepdim=True)
    # Rounding may leave nothing for the tail, whose log must stay finite.
    total_T1 = total_T1.clamp(max=-torch.finfo(total_T1.dtype).eps)
    return torch.cat([_precise(logprob_TK), (-total_T1.expm1()).log()], dim=-1)


def generalised_jsd(
    student_logprob_TX: Tensor, teacher_logprob_TX: Tensor, *, beta: float
) -> Tensor:
    """[T] nats: beta KL(teacher || m) + (1 - beta) KL(student || m), m = beta teacher + (1 - beta)
    student (2306.13649).

    The formula is 0 for beta = 0 and 1; they stand for its limits by weight, KL(teacher || student)
    and KL(student || teacher). float32 at least. ValueError for another beta than 0 to 1.
    """
    if not 0 <= beta <= 1:
        raise ValueError(f"beta={beta}; expected 0 (forward KL) to 1 (reverse KL)")
    student_TX, teacher_TX = _precise(student_logprob_TX), _precise(teacher_logprob_TX)
    if beta == 0:
        return _kl(teacher_TX, student_TX)
    if beta == 1:
        return _kl(student_TX, teacher_TX)
    log_beta, log_rest = torch.tensor([beta, 1 - beta], dtype=torch.float64).log().tolist()
    mixture_TX = torch.logaddexp(teacher_TX + log_beta, student_TX + log_rest)
    return beta * _kl(teacher_TX, mixture_TX) + (1 - beta) * _kl(student_TX, mixture_TX)


def _precise(logprob_TX: Tensor) -> Tensor:
    dtype = torch.promote_types(logprob_TX.dtype, torch.float32)
    return logprob_TX.to(dtype).clamp(min=_LEAST_LOGPROB)


def _kl(from_logprob_TX: Tensor, to_logprob_TX: Tensor) -> Tensor:
    """[T] nats: KL(from || to)."""
    return (from_logprob_TX.exp() * (from_logprob_TX - to_logprob_TX)).sum(dim=-1)
