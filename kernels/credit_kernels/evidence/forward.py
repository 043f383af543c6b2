"""The forward divergence: contrasts of probabilities, KL(q0 || p) and -w sum_v d log p."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from credit_kernels.evidence.block import Block
from credit_kernels.evidence.contrast import Contrast
from credit_kernels.evidence.sums import ContrastSums, combine, spread_of, without


@dataclass(frozen=True, eq=False)
class ForwardSums(ContrastSums):
    """Sums over columns of a contrast of probabilities, on the support."""

    mass_XT: Tensor
    """Sums of the variables: 0 for task and nuisance over a softmax's own columns."""
    cross_XT: Tensor
    """Sums of variable times log p."""
    free_mass_T: Tensor
    """Sum of q0."""
    reference_T: Tensor
    """Sum of q0 (log q0 - log p)."""

    @classmethod
    def of(
        cls, block: Block, contrast: Contrast, *, complete: bool, with_loss: bool
    ) -> "ForwardSums":
        """Over the columns of a block; `complete` where they will be merged with others."""
        roles = contrast.roles(block.num_contexts)
        basis = contrast.basis()[: None if complete else contrast.num_variables()]
        variables = [
            combine(row, [block.prob_PRV[role] for role in roles]) for row in basis.tolist()
        ]
        cross_XR = mass_XR = block.zeros(len(variables))
        reference_R, free_mass_R = block.zeros(2)
        if with_loss:
            cross_XR = torch.stack([block.sum(x_RV * block.log_PRV[0]) for x_RV in variables])
            reference_R = block.divergence(contrast.free, 0)
            mass_XR = torch.stack([block.sum(x_RV) for x_RV in variables])
            free_mass_R = block.sum(block.prob_PRV[contrast.free])
            if not block.on_support:
                # Exactly, so that no rounding is multiplied by a logarithm when shards merge.
                mass_XR = basis.sum(1).to(mass_XR)[:, None].expand_as(mass_XR)
                free_mass_R = torch.ones_like(free_mass_R)
        spread = spread_of(block.prob_PRV[0], variables, contrast.num_variables(), block.on_support)
        return cls(contrast, roles, spread, mass_XR, cross_XR, free_mass_R, reference_R)

    @property
    def others(self) -> tuple[Tensor, ...]:
        """The fields, T last."""
        return self.mass_XT, self.cross_XT, self.free_mass_T, self.reference_T

    def rescaled(self, log_factor_PT: Tensor) -> "ForwardSums":
        """The sums if the probabilities of every context are multiplied by a factor."""
        factor_PT = log_factor_PT.exp()
        basis = self.contrast.basis().to(factor_PT.device)
        factor_JT = factor_PT[list(self.roles)]
        map_XXT = torch.einsum("xj,jt,jy->xyt", basis, factor_JT, basis.inverse())
        log_student_T, log_free_T = log_factor_PT[0], log_factor_PT[self.contrast.free]
        free_T = factor_PT[self.contrast.free]
        return replace(
            self,
            spread=self.spread.mapped(map_XXT, factor_PT[0]),
            mass_XT=torch.einsum("xyt,yt->xt", map_XXT, self.mass_XT),
            cross_XT=torch.einsum(
                "xyt,yt->xt", map_XXT, self.cross_XT + log_student_T * self.mass_XT
            ),
            free_mass_T=free_T * self.free_mass_T,
            reference_T=free_T
            * (self.reference_T + (log_free_T - log_student_T) * self.free_mass_T),
        )

    def settled(self) -> "ForwardSums":
        """Ready to be read."""
        return self

    def at_target_T(self, alpha_T: Tensor, logprob_PT: Tensor) -> Tensor:
        """d of the sampled token, from its log-probs."""
        coefficient_JT = self.contrast.coefficients(alpha_T)
        return (coefficient_JT * logprob_PT[list(self.roles)].exp()).sum(0)

    def evidence_T(self, alpha_T: Tensor) -> Tensor:
        """- sum_v d log p."""
        return -without(alpha_T, self.cross_XT[: self.contrast.num_variables()])

    def offsets_2T(self, alpha_T: Tensor) -> Tensor:
        """What multiplies p in the gradients of the reference and of the evidence."""
        mass_T = without(alpha_T, self.mass_XT[: self.contrast.num_variables()])
        return torch.stack([self.free_mass_T, mass_T])


def logit_gradient(
    block: Block, contrast: Contrast, alpha_R: Tensor, offset_2R: Tensor, incoming_2R: Tensor
) -> Tensor:
    """[R, V] gradient of the student's logits; `incoming` at the reference and the evidence.

    Of the reference it is p sum q0 - q0, of - sum d log p it is p sum d - d; alpha, the controller
    and the teachers are constants.
    """
    scale_JR = -incoming_2R[1] * contrast.coefficients(alpha_R)
    total_RV = block.prob_PRV[contrast.free] * -incoming_2R[0][:, None]
    for role, scale_R in zip(contrast.roles(block.num_contexts), scale_JR, strict=True):
        total_RV.addcmul_(block.prob_PRV[role], scale_R[:, None])
    if block.kept_RV is not None:
        total_RV.mul_(block.kept_RV)
    return total_RV.addcmul_(block.prob_PRV[0], (incoming_2R * offset_2R).sum(0)[:, None])
