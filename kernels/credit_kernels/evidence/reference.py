"""The plain computation, with all logits in memory: the truth that backends are compared with."""

from dataclasses import dataclass

import torch
from torch import Tensor

from credit_kernels.evidence.contrast import Contrast, ContrastArgument
from credit_kernels.evidence.moments import EvidenceStats


@dataclass(frozen=True, kw_only=True)
class Plain:
    """The options of both operations; one rank only."""

    total: int
    contrast: ContrastArgument | None
    temperature: float = 1.0
    softcap: float | None = None
    divergence: str = "forward"
    top_k: int | None = None

    def stats(
        self,
        hidden_CTH: Tensor,
        weight_VH: Tensor,
        target_T: Tensor,
        teacher_weight_VH: Tensor | None = None,
    ) -> EvidenceStats:
        """What `evidence_stats` computes, in at least float32."""
        log_CTV = self._log_probs(hidden_CTH, weight_VH, teacher_weight_VH)
        kept_T, index_T1 = self._targets(target_T)
        prob_CTV = log_CTV.exp()
        ratio_CTV = log_CTV - log_CTV[0]
        values = [
            log_CTV.gather(-1, index_T1.expand(len(log_CTV), -1, -1))[..., 0],
            -(prob_CTV * log_CTV).sum(-1),
            (prob_CTV * ratio_CTV).sum(-1),
            -(prob_CTV[0] * ratio_CTV).sum(-1),
        ]
        if self.contrast is not None:
            support_TV = self._support(log_CTV, target_T)
            prob_TV = prob_CTV[0] * support_TV
            _, alpha_T, contrast_TV = self._contrast(log_CTV, support_TV)
            values += [
                alpha_T,
                contrast_TV.gather(-1, index_T1)[:, 0],
                (prob_TV * contrast_TV).sum(-1),
                _covariance(prob_TV, contrast_TV, contrast_TV, support_TV),
            ]
        return EvidenceStats(*(value.where(kept_T, 0) for value in values))

    def loss(
        self,
        hidden_CTH: Tensor,
        weight_VH: Tensor,
        target_T: Tensor,
        controller_T: Tensor,
        teacher_weight_VH: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What `evidence_loss` computes, by autograd's own operations."""
        assert self.contrast is not None
        contrast = Contrast.parse(self.contrast, len(hidden_CTH))
        with torch.no_grad():
            teacher_CTV = self._log_probs(hidden_CTH, weight_VH, teacher_weight_VH)
            support_TV = self._support(teacher_CTV, target_T)
            ratio_TV, _, contrast_TV = self._contrast(teacher_CTV, support_TV)
        log_TV = self._log_probs(hidden_CTH[:1], weight_VH, None)[0]
        free_TV, w_T = teacher_CTV[contrast.free], controller_T.detach().to(log_TV.dtype)
        if self.divergence == "forward":
            reference_T = (free_TV.exp() * (free_TV - log_TV) * support_TV).sum(-1)
            evidence_T = -w_T * (contrast_TV * log_TV).sum(-1)
        else:
            prob_TV = log_TV.exp() * support_TV
            reference_T = (prob_TV * (log_TV - free_TV)).sum(-1)
            tilted_TV = _negative(contrast, teacher_CTV) + w_T[:, None] * ratio_TV
            tilted_TV = tilted_TV.masked_fill(~support_TV, -torch.inf)
            evidence_T = tilted_TV.logsumexp(-1) - w_T * (prob_TV * ratio_TV).sum(-1)
        kept_T, _ = self._targets(target_T)
        return reference_T.where(kept_T, 0), evidence_T.where(kept_T, 0)

    def _log_probs(
        self, hidden_CTH: Tensor, weight_VH: Tensor, teacher_weight_VH: Tensor | None
    ) -> Tensor:
        """[C, T, V]."""
        teacher_weight_VH = weight_VH if teacher_weight_VH is None else teacher_weight_VH
        compute = torch.promote_types(hidden_CTH.dtype, torch.float32)
        logits = []
        for context, hidden_TH in enumerate(hidden_CTH):
            context_VH = (teacher_weight_VH if context else weight_VH)[: self.total]
            logits.append(hidden_TH.to(compute) @ context_VH.to(compute).T)
        logit_CTV = torch.stack(logits)
        if self.softcap is not None:
            logit_CTV = torch.tanh(logit_CTV / self.softcap) * self.softcap
        return torch.log_softmax(logit_CTV / self.temperature, -1)

    def _targets(self, target_T: Tensor) -> tuple[Tensor, Tensor]:
        """Whether each counts, and [T, 1] their columns."""
        kept_T = (target_T >= 0) & (target_T < self.total)
        return kept_T, target_T.where(kept_T, 0)[:, None]

    def _support(self, log_CTV: Tensor, target_T: Tensor) -> Tensor:
        """[T, V] bool."""
        support_TV = torch.ones_like(log_CTV[0], dtype=torch.bool)
        if self.top_k is None or self.top_k >= self.total or self.contrast is None:
            return support_TV
        contrast = Contrast.parse(self.contrast, len(log_CTV))
        log_JTV = log_CTV[list(contrast.named)]
        support_TV = (log_JTV >= log_JTV.topk(self.top_k, -1).values[..., -1:]).any(0)
        return support_TV.scatter(-1, self._targets(target_T)[1], True)

    def _contrast(self, log_CTV: Tensor, support_TV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """r (reverse only), alpha, and d or the tangent in its place, 0 off the support."""
        assert self.contrast is not None
        contrast = Contrast.parse(self.contrast, len(log_CTV))
        positive_TV, negative_TV = log_CTV[contrast.positive], _negative(contrast, log_CTV)
        free_TV, prob_TV = log_CTV[contrast.free], log_CTV[0].exp() * support_TV
        if self.divergence == "forward":
            positive_TV, negative_TV, free_TV = positive_TV.exp(), negative_TV.exp(), free_TV.exp()
        task_TV = positive_TV - negative_TV
        nuisance_TV = (positive_TV + negative_TV) / 2 - free_TV
        vectors = [vector_TV * support_TV for vector_TV in (task_TV, nuisance_TV)]
        if self.divergence == "reverse":
            vectors = [
                prob_TV * (vector_TV - (prob_TV * vector_TV).sum(-1, keepdim=True))
                for vector_TV in vectors
            ]
        alpha_T = torch.zeros_like(prob_TV[:, 0])
        if contrast.kind == "fec":
            covariance_T = _covariance(prob_TV, *vectors, support_TV)
            variance_T = _covariance(prob_TV, vectors[1], vectors[1], support_TV)
            alpha_T = covariance_T / (variance_T + 1e-8)
        contrast_TV = vectors[0] - alpha_T[:, None] * vectors[1]
        return task_TV - alpha_T[:, None] * nuisance_TV, alpha_T, contrast_TV


def _negative(contrast: Contrast, log_CTV: Tensor) -> Tensor:
    """[T, V] log of the mean of the negatives' probabilities."""
    return log_CTV[list(contrast.negatives)].exp().mean(0).log()


def _covariance(prob_TV: Tensor, a_TV: Tensor, b_TV: Tensor, support_TV: Tensor) -> Tensor:
    """Cov_p by centred products; on a support p may add up to less than 1."""
    mean_a_T1 = (prob_TV * a_TV).sum(-1, keepdim=True)
    mean_b_T1 = (prob_TV * b_TV).sum(-1, keepdim=True)
    centred_T = (prob_TV * (a_TV - mean_a_T1) * (b_TV - mean_b_T1)).sum(-1)
    missing_T = torch.where(support_TV.all(-1), 0, 1 - prob_TV.sum(-1))
    return centred_T + missing_T * (mean_a_T1 * mean_b_T1)[:, 0]
