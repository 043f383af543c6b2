"""What is benchmarked: each operation in eager torch and by our backends.

C, where it stands, counts the student and its teachers: two, or one of the divergence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from credit_kernels.divergence import divergence_loss
from credit_kernels.evidence import evidence_loss, evidence_stats
from credit_kernels.evidence.cases import fields
from credit_kernels.logprob import linear_logprob

TEMPERATURE = 0.7
CONTROLLER = 0.5
CONTRAST = ("fec", 1, 2, 0)
"""The student stands for the context without evidence."""
BETA = 0.5
TOP_K = 100
"""Tokens of the divergence that are told apart, as SDPO and SRPO do."""

Compute = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
"""(hidden_TH or hidden_CTH, weight_VH, target_T) -> outputs."""


def log_probs(hidden: Tensor, weight_VH: Tensor, temperature: float = TEMPERATURE) -> Tensor:
    """[..., T, V] as eager torch makes them: logits rounded to the inputs' type, the rest not."""
    logits = hidden @ weight_VH.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.log_softmax(logits / temperature, -1)


def eager_cross_entropy(
    hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor
) -> tuple[Tensor, ...]:
    """(mean of -logprob_T,), at temperature 1."""
    log_TV = log_probs(hidden_TH, weight_VH, 1.0)
    return (torch.nn.functional.nll_loss(log_TV, target_T),)


def eager_logprob(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> tuple[Tensor, ...]:
    """(logprob_T,)"""
    log_TV = log_probs(hidden_TH, weight_VH)
    return (log_TV.gather(-1, target_T[:, None])[:, 0],)


def eager_logprob_entropy(
    hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor
) -> tuple[Tensor, ...]:
    """(logprob_T, entropy_T)"""
    log_TV = log_probs(hidden_TH, weight_VH)
    entropy_T = -(log_TV.exp() * log_TV).sum(-1)
    return log_TV.gather(-1, target_T[:, None])[:, 0], entropy_T


def eager_evidence_stats(
    hidden_CTH: Tensor, weight_VH: Tensor, target_T: Tensor
) -> tuple[Tensor, ...]:
    """The fields of EvidenceStats."""
    log_CTV = log_probs(hidden_CTH, weight_VH)
    prob_CTV, ratio_CTV = log_CTV.exp(), log_CTV - log_CTV[0]
    index_T1 = target_T[:, None]
    alpha_T, contrast_TV = _contrast(prob_CTV)
    mean_T1 = (prob_CTV[0] * contrast_TV).sum(-1, keepdim=True)
    return (
        log_CTV.gather(-1, index_T1.expand(len(log_CTV), -1, -1))[..., 0],
        -(prob_CTV * log_CTV).sum(-1),
        (prob_CTV * ratio_CTV).sum(-1),
        -(prob_CTV[0] * ratio_CTV).sum(-1),
        alpha_T,
        contrast_TV.gather(-1, index_T1)[:, 0],
        mean_T1[:, 0],
        (prob_CTV[0] * (contrast_TV - mean_T1).square()).sum(-1),
    )


def eager_evidence_loss(
    hidden_CTH: Tensor, weight_VH: Tensor, target_T: Tensor
) -> tuple[Tensor, ...]:
    """(reference_T, evidence_T)"""
    with torch.no_grad():
        teacher_CTV = log_probs(hidden_CTH, weight_VH)
        prob_CTV = teacher_CTV.exp()
        _, contrast_TV = _contrast(prob_CTV)
    log_TV = log_probs(hidden_CTH[0], weight_VH)
    reference_T = (prob_CTV[0] * (teacher_CTV[0] - log_TV)).sum(-1)
    return reference_T, -CONTROLLER * (contrast_TV * log_TV).sum(-1)


def eager_divergence(hidden_CTH: Tensor, weight_VH: Tensor, target_T: Tensor) -> tuple[Tensor, ...]:
    """(divergence_T,) over all columns"""
    log_TV = log_probs(hidden_CTH[0], weight_VH)
    with torch.no_grad():
        teacher_TV = log_probs(hidden_CTH[1], weight_VH)
    return (_jsd(log_TV, teacher_TV),)


def eager_divergence_top_k(
    hidden_CTH: Tensor, weight_VH: Tensor, target_T: Tensor
) -> tuple[Tensor, ...]:
    """(divergence_T,) over the student's most likely tokens and all others as one event"""
    log_TV = log_probs(hidden_CTH[0], weight_VH)
    with torch.no_grad():
        teacher_TV = log_probs(hidden_CTH[1], weight_VH)
        top_TK = log_TV.topk(TOP_K).indices
    return (_jsd(*(_events(one_TV, top_TK) for one_TV in (log_TV, teacher_TV))),)


def _events(log_TV: Tensor, top_TK: Tensor) -> Tensor:
    """[T, K + 1] log-probs of the events."""
    tail_T1 = log_TV.scatter(-1, top_TK, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([log_TV.gather(-1, top_TK), tail_T1], -1)


def _jsd(student_TX: Tensor, teacher_TX: Tensor) -> Tensor:
    """Of events with these log-probs."""
    student_prob_TX, teacher_prob_TX = student_TX.exp(), teacher_TX.exp()
    mixture_TX = torch.lerp(student_prob_TX, teacher_prob_TX, BETA).log()
    teacher_T = (teacher_prob_TX * (teacher_TX - mixture_TX)).sum(-1)
    student_T = (student_prob_TX * (student_TX - mixture_TX)).sum(-1)
    return BETA * teacher_T + (1 - BETA) * student_T


def _contrast(prob_CTV: Tensor) -> tuple[Tensor, Tensor]:
    """alpha_T and d of CONTRAST, as [T, V]."""
    student_TV, positive_TV, negative_TV = prob_CTV
    task_TV = positive_TV - negative_TV
    nuisance_TV = (positive_TV + negative_TV) / 2 - student_TV
    centred_TV = nuisance_TV - (student_TV * nuisance_TV).sum(-1, keepdim=True)
    covariance_T = (student_TV * centred_TV * task_TV).sum(-1)
    variance_T = (student_TV * centred_TV.square()).sum(-1)
    alpha_T = covariance_T / (variance_T + 1e-8)
    return alpha_T, task_TV - alpha_T[:, None] * nuisance_TV


def _cross_entropy(
    hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor, *, backend: str
) -> tuple[Tensor, ...]:
    logprob_T = linear_logprob(hidden_TH, weight_VH, target_T, backend=backend)
    assert isinstance(logprob_T, Tensor)
    return (-logprob_T.mean(),)


def _logprob(
    hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor, *, backend: str
) -> tuple[Tensor, ...]:
    inputs = (hidden_TH, weight_VH, target_T)
    logprob_T = linear_logprob(*inputs, temperature=TEMPERATURE, backend=backend)
    assert isinstance(logprob_T, Tensor)
    return (logprob_T,)


def _logprob_entropy(
    hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor, *, backend: str
) -> tuple[Tensor, ...]:
    inputs = (hidden_TH, weight_VH, target_T)
    logprob_T, entropy_T = linear_logprob(
        *inputs, temperature=TEMPERATURE, backend=backend, return_entropy=True
    )
    return logprob_T, entropy_T


def _evidence_stats(
    hidden_CTH: Tensor, weight_VH: Tensor, target_T: Tensor, *, backend: str
) -> tuple[Tensor, ...]:
    inputs = (hidden_CTH, weight_VH, target_T)
    return fields(
        evidence_stats(*inputs, contrast=CONTRAST, temperature=TEMPERATURE, backend=backend)
    )


def _evidence_loss(
    hidden_CTH: Tensor, weight_VH: Tensor, target_T: Tensor, *, backend: str
) -> tuple[Tensor, ...]:
    controller_T = torch.full(target_T.shape, CONTROLLER, device=target_T.device)
    inputs = (hidden_CTH, weight_VH, target_T, controller_T)
    return evidence_loss(*inputs, contrast=CONTRAST, temperature=TEMPERATURE, backend=backend)


def _divergence(
    hidden_CTH: Tensor,
    weight_VH: Tensor,
    target_T: Tensor,
    *,
    backend: str,
    top_k: int | None = None,
) -> tuple[Tensor, ...]:
    student_TH, teacher_TH = hidden_CTH
    divergence_T = divergence_loss(
        student_TH,
        teacher_TH,
        weight_VH,
        target_T,
        beta=BETA,
        top_k=top_k,
        temperature=TEMPERATURE,
        backend=backend,
    )
    return (divergence_T,)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A result that several methods compute."""

    name: str
    eager: Compute
    ours: Callable[..., tuple[Tensor, ...]]
    """Compute, with a backend besides."""
    contexts: int | None = None
    """None: hidden is hidden_TH."""
    trained: bool = True
    """A backward pass follows."""
    frozen_head: bool = False
    """The weight has no gradient."""
    backends: tuple[str, ...] = ("torch", "rows", "tiles")
    """Those of ours that know it."""

    def by(self, backend: str) -> Compute:
        """Our computation by one backend."""
        return partial(self.ours, backend=backend)


OPERATIONS = (
    Operation(name="cross_entropy", eager=eager_cross_entropy, ours=_cross_entropy),
    Operation(name="logprob", eager=eager_logprob, ours=_logprob),
    Operation(name="logprob_entropy", eager=eager_logprob_entropy, ours=_logprob_entropy),
    Operation(
        name="evidence_stats",
        eager=eager_evidence_stats,
        ours=_evidence_stats,
        contexts=3,
        trained=False,
    ),
    Operation(name="evidence_loss", eager=eager_evidence_loss, ours=_evidence_loss, contexts=3),
    Operation(
        name="evidence_loss_frozen_head",
        eager=eager_evidence_loss,
        ours=_evidence_loss,
        contexts=3,
        frozen_head=True,
    ),
    Operation(
        name="divergence_loss",
        eager=eager_divergence,
        ours=_divergence,
        contexts=2,
        backends=("torch",),
    ),
    Operation(
        name="divergence_loss_top_k",
        eager=eager_divergence_top_k,
        ours=partial(_divergence, top_k=TOP_K),
        contexts=2,
        backends=("torch",),
    ),
)
