"""The reverse divergence: contrasts r of log-probs, KL(p || q0), log sum_v q_b e^wr - w E_p[r]."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from credit_kernels.evidence.block import Block
from credit_kernels.evidence.contrast import Contrast
from credit_kernels.evidence.sums import ContrastSums, Spread, combine, spread_of, without
from credit_kernels.vocab_parallel import LOWEST


@dataclass(frozen=True, eq=False)
class ReverseSums(ContrastSums):
    """Sums over columns of a contrast of log-probs, on the support.

    r counts as many log-ratios K as there are variables: task and, for fec, nuisance. The variables
    of the spread are their tangents p (r - centre) and, where shards merge, p.
    """

    ratio_KT: Tensor
    """Sums of p r."""
    reference_T: Tensor
    """Sum of p (log p - log q0)."""
    centre_KT: Tensor

    @classmethod
    def of(
        cls, block: Block, contrast: Contrast, *, complete: bool, with_loss: bool
    ) -> "ReverseSums":
        """Over the columns of a block; `complete` where they will be merged with others."""
        roles = contrast.roles(block.num_contexts)
        prob_RV = block.prob_PRV[0]
        variables, centres = [], []
        for row in contrast.basis()[: contrast.num_variables()].tolist():
            ratio_RV = combine(row, [block.log_PRV[role] for role in roles])
            centre_R = (prob_RV * ratio_RV).sum(-1)
            variables.append(ratio_RV.sub_(centre_R[:, None]).mul_(prob_RV))
            centres.append(centre_R.double())
        centre_KR = torch.stack(centres)
        if complete:
            variables.append(prob_RV.clone())
        reference_R = block.divergence(0, contrast.free) if with_loss else block.zeros(1)[0]
        spread = spread_of(prob_RV, variables, contrast.num_variables(), block.on_support)
        return cls(contrast, roles, spread, centre_KR, reference_R, centre_KR)

    @property
    def others(self) -> tuple[Tensor, ...]:
        """The fields, T last; sums add up where the centre is 0."""
        return self.ratio_KT, self.reference_T, self.centre_KT

    def rescaled(self, log_factor_PT: Tensor) -> "ReverseSums":
        """The sums if the probabilities of every context are multiplied by a factor; centre 0."""
        basis = self.contrast.basis()[: len(self.ratio_KT)].to(log_factor_PT.device)
        shift_KT = basis @ log_factor_PT[list(self.roles)]
        log_student_T, log_free_T = log_factor_PT[0], log_factor_PT[self.contrast.free]
        student_T, weight_T = log_student_T.exp(), self.spread.weight_T
        return replace(
            self,
            spread=self._shifted(self.centre_KT + shift_KT, student_T),
            ratio_KT=student_T * (self.ratio_KT + shift_KT * weight_T),
            reference_T=student_T * (self.reference_T + (log_student_T - log_free_T) * weight_T),
            centre_KT=torch.zeros_like(self.centre_KT),
        )

    def settled(self) -> "ReverseSums":
        """Centred on E_p[r], ready to be read."""
        spread = self._shifted(self.centre_KT - self.ratio_KT, torch.ones_like(self.ratio_KT[0]))
        return replace(self, spread=spread, centre_KT=self.ratio_KT)

    def at_target_T(self, alpha_T: Tensor, logprob_PT: Tensor) -> Tensor:
        """Tangent of the sampled token, from its log-probs."""
        coefficient_JT = self.contrast.coefficients(alpha_T)
        ratio_T = (coefficient_JT * logprob_PT[list(self.roles)]).sum(0)
        return logprob_PT[0].exp() * (ratio_T - self.mean_ratio_T(alpha_T))

    def mean_ratio_T(self, alpha_T: Tensor) -> Tensor:
        """E_p[r]."""
        return without(alpha_T, self.ratio_KT)

    def evidence_T(self, alpha_T: Tensor) -> Tensor:
        """- E_p[r], without the constant that `tilted` gives."""
        return -self.mean_ratio_T(alpha_T)

    def offsets_2T(self, alpha_T: Tensor) -> Tensor:
        """What multiplies p in the gradients of the reference and of the evidence."""
        missing_T = 1 - self.spread.weight_T
        return torch.stack([missing_T - self.reference_T, self.mean_ratio_T(alpha_T)])

    def _shifted(self, shift_KT: Tensor, student_T: Tensor) -> Spread:
        """With tangents of r + shift, under student probabilities that are multiplied."""
        num_variables = len(shift_KT)
        map_XXT = torch.eye(num_variables + 1).to(shift_KT)[..., None] * student_T
        map_XXT[:num_variables, num_variables] = shift_KT * student_T
        return self.spread.mapped(map_XXT, student_T)


def tilted(block: Block, contrast: Contrast, alpha_R: Tensor, controller_R: Tensor) -> Tensor:
    """[R, V]: log q_b + w r, LOWEST off the support."""
    roles = contrast.roles(block.num_contexts)
    total_RV = block.log_PRV[roles[1]].clone()
    for role, coefficient_R in zip(roles, contrast.coefficients(alpha_R), strict=True):
        total_RV.addcmul_(block.log_PRV[role], (coefficient_R * controller_R)[:, None])
    return total_RV if block.kept_RV is None else total_RV.where(block.kept_RV, LOWEST)


def logit_gradient(
    block: Block, contrast: Contrast, alpha_R: Tensor, offset_2R: Tensor, incoming_2R: Tensor
) -> Tensor:
    """[R, V] gradient of the student's logits; `incoming` at the reference and the evidence.

    Of the reference it is p (log p/q0 - KL), of - E_p[r] it is p (E_p[r] - r); alpha, the
    controller and the teachers are constants.
    """
    incoming_R1 = incoming_2R[0][:, None]
    scale_JR = -incoming_2R[1] * contrast.coefficients(alpha_R)
    total_RV = (block.log_PRV[0] - block.log_PRV[contrast.free]).mul_(incoming_R1)
    for role, scale_R in zip(contrast.roles(block.num_contexts), scale_JR, strict=True):
        total_RV.addcmul_(block.log_PRV[role], scale_R[:, None])
    if block.kept_RV is not None:
        # The gradient of p log p has one p more, which over all columns adds up to nothing.
        total_RV.add_(incoming_R1).mul_(block.kept_RV).sub_(incoming_R1)
    return total_RV.add_((incoming_2R * offset_2R).sum(0)[:, None]).mul_(block.prob_PRV[0])
