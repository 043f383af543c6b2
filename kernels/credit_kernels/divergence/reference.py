"""The plain computation, with all logits in memory: the truth that backends are compared with."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Plain:
    """The options of the operation; one rank only."""

    total: int
    beta: float = 0.5
    top_k: int | None = None
    temperature: float = 1.0
    softcap: float | None = None

    def divergence(
        self,
        hidden_TH: Tensor,
        teacher_hidden_TH: Tensor,
        weight_VH: Tensor,
        target_T: Tensor,
        teacher_weight_VH: Tensor | None = None,
    ) -> Tensor:
        """What `divergence_loss` computes, by autograd's own operations, in at least float32."""
        student_TX = self._log_probs(hidden_TH, weight_VH)
        with torch.no_grad():
            teacher_VH = weight_VH if teacher_weight_VH is None else teacher_weight_VH
            teacher_TX = self._log_probs(teacher_hidden_TH, teacher_VH)
            order_TV = student_TX.sort(dim=-1, descending=True, stable=True).indices
        if self.top_k is not None and self.top_k < self.total:
            student_TX = self._events(student_TX.gather(-1, order_TV))
            teacher_TX = self._events(teacher_TX.gather(-1, order_TV))
        kept_T = (target_T >= 0) & (target_T < self.total)
        return self._jsd(student_TX, teacher_TX).where(kept_T, 0)

    def _log_probs(self, hidden_TH: Tensor, weight_VH: Tensor) -> Tensor:
        """[T, V]."""
        compute = torch.promote_types(hidden_TH.dtype, torch.float32)
        logit_TV = hidden_TH.to(compute) @ weight_VH[: self.total].to(compute).T
        if self.softcap is not None:
            logit_TV = torch.tanh(logit_TV / self.softcap) * self.softcap
        return torch.log_softmax(logit_TV / self.temperature, -1)

    def _events(self, ordered_TV: Tensor) -> Tensor:
        """[T, K + 1]: the first K, and all others together."""
        told_TK, others_TN = ordered_TV[:, : self.top_k], ordered_TV[:, self.top_k :]
        return torch.cat([told_TK, others_TN.logsumexp(-1, keepdim=True)], -1)

    def _jsd(self, student_TX: Tensor, teacher_TX: Tensor) -> Tensor:
        if self.beta == 0:
            return _kl(teacher_TX, student_TX)
        if self.beta == 1:
            return _kl(student_TX, teacher_TX)
        shares = torch.tensor([self.beta, 1 - self.beta], dtype=torch.float64).log().tolist()
        mixture_TX = torch.logaddexp(teacher_TX + shares[0], student_TX + shares[1])
        teacher_T, student_T = _kl(teacher_TX, mixture_TX), _kl(student_TX, mixture_TX)
        return self.beta * teacher_T + (1 - self.beta) * student_T


def _kl(from_TX: Tensor, to_TX: Tensor) -> Tensor:
    return (from_TX.exp() * (from_TX - to_TX)).sum(-1)
