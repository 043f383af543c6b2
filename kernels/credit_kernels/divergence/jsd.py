"""The generalised JSD of two distributions, from log-probs and probabilities of their events.

Shape letters: 2 is (student, teacher), R rows, X events: columns of the vocabulary, or those of a
support and the tail.
"""

import torch
from torch import Tensor


def divergence(log_2RX: Tensor, prob_2RX: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """[R] float64 each, sums over the events: the divergence, and its part p dD/dp.

    The latter is what `pull` needs of a row's other events; 0 for a beta of 0, where it does not.
    """
    (student_RX, teacher_RX), (p_RX, q_RX) = log_2RX, prob_2RX
    if beta == 0:
        divergence_R = (q_RX * (teacher_RX - student_RX)).sum(-1).double()
        return divergence_R, torch.zeros_like(divergence_R)
    if beta == 1:
        divergence_R = (p_RX * (student_RX - teacher_RX)).sum(-1).double()
        return divergence_R, divergence_R
    mixture_RX = _log_mixture(prob_2RX, beta)
    own_R = (1 - beta) * (p_RX * (student_RX - mixture_RX)).sum(-1).double()
    return beta * (q_RX * (teacher_RX - mixture_RX)).sum(-1).double() + own_R, own_R


def pull(log_2RX: Tensor, prob_2RX: Tensor, beta: float, own_R: Tensor) -> Tensor:
    """[R, X]: gradient of the divergence in the logits of the student's events.

    p (dD/dp - sum of p dD/dp), where dD/dp is (1 - beta) log p / m or one of its limits by weight:
    what else the product rule gives is the same for all events and falls out.
    """
    (student_RX, teacher_RX), (p_RX, q_RX) = log_2RX, prob_2RX
    if beta == 0:
        return p_RX - q_RX
    if beta == 1:
        slope_RX = student_RX - teacher_RX
    else:
        slope_RX = (student_RX - _log_mixture(prob_2RX, beta)).mul_(1 - beta)
    return slope_RX.sub_(own_R[:, None]).mul_(p_RX)


def _log_mixture(prob_2RX: Tensor, beta: float) -> Tensor:
    p_RX, q_RX = prob_2RX
    # Where both are 0 in this type, whatever finite number stands here is multiplied by 0.
    return p_RX.lerp(q_RX, beta).clamp_min_(torch.finfo(p_RX.dtype).tiny).log_()
