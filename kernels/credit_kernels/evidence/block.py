"""Log-probs and probabilities of every context in one tile, and sums over its columns."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from credit_kernels.logprob.head import exp_
from credit_kernels.vocab_parallel import LOWEST


@dataclass(frozen=True, eq=False)
class Block:
    """A few rows of tokens and some columns, in every context and, last, the mean negative.

    P counts contexts and that mean, where there are several negatives.
    """

    log_PRV: Tensor
    prob_PRV: Tensor
    num_contexts: int
    kept_RV: Tensor | None
    """bool: the support of top_k; None for all columns."""

    @classmethod
    def of(
        cls, logit_CRV: Tensor, max_CR: Tensor, sum_CR: Tensor, kept_RV: Tensor | None
    ) -> "Block":
        """From logits, which are overwritten, and their normalisers."""
        shifted_CRV = logit_CRV.sub_(max_CR[..., None])
        # Not exp(z - log sum): its rounding would be common to all columns of a context.
        prob_CRV = exp_(shifted_CRV.clone()).mul_(1 / sum_CR[..., None])
        log_CRV = shifted_CRV.sub_(sum_CR.log()[..., None])
        return cls(log_CRV, prob_CRV, len(logit_CRV), kept_RV)

    @property
    def on_support(self) -> bool:
        """Columns are missing from the sums."""
        return self.kept_RV is not None

    def with_mean_of(self, negatives: tuple[int, ...], log_share_CR: Tensor) -> "Block":
        """With the mean of some contexts behind, each `log_share` larger than its softmax here."""
        chosen = list(negatives)
        log_KRV = self.log_PRV[chosen] + log_share_CR[chosen][..., None]
        return self._appended(torch.logsumexp(log_KRV, 0).sub_(math.log(len(chosen))))

    def normalised_mean(self) -> tuple["Block", Tensor]:
        """With that mean as a softmax of the columns here, and the log of its mass here."""
        log_mass_R = torch.logsumexp(self.log_PRV[-1], -1).clamp_min(LOWEST)
        contexts = replace(self, log_PRV=self.log_PRV[:-1], prob_PRV=self.prob_PRV[:-1])
        return contexts._appended(self.log_PRV[-1] - log_mass_R[:, None]), log_mass_R

    def _appended(self, log_RV: Tensor) -> "Block":
        return replace(
            self,
            log_PRV=torch.cat([self.log_PRV, log_RV[None]]),
            prob_PRV=torch.cat([self.prob_PRV, log_RV.exp()[None]]),
        )

    def restricted(self) -> "Block":
        """With probabilities of 0 off the support."""
        if self.kept_RV is None:
            return self
        return replace(self, prob_PRV=self.prob_PRV * self.kept_RV)

    def sum(self, value_RV: Tensor) -> Tensor:
        """Over the columns, float64."""
        return value_RV.sum(-1).double()

    def zeros(self, *shape: int) -> Tensor:
        """[*shape, R] float64."""
        return self.prob_PRV.new_zeros(*shape, self.prob_PRV.shape[1], dtype=torch.float64)

    def divergence(self, place: int, other: int) -> Tensor:
        """KL(place || other) over the columns."""
        return self.sum(self.prob_PRV[place] * (self.log_PRV[place] - self.log_PRV[other]))
