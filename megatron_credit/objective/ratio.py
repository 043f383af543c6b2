"""Ratios of probabilities from log-probs, safe at any distance."""

import torch
from torch import Tensor

MAX_EXPONENT = 20.0
"""exp(20) is far outside every clip range and far inside float32."""


def masked(value_T: Tensor, mask_T: Tensor) -> Tensor:
    """The values where the mask is True, else 0; what stands there may be NaN, without gradient."""
    return torch.where(mask_T, value_T, 0.0)


def probability_ratio(numerator_T: Tensor, denominator_T: Tensor, mask_T: Tensor) -> Tensor:
    """exp(numerator - denominator) of log-probs, the exponent within +-20; 1 outside the mask.

    Masked before exp, so that neither value nor gradient sees what stands outside. Beyond the bound
    the gradient is 0, as the ratio no longer depends on its inputs there.
    """
    log_ratio_T = masked(numerator_T, mask_T) - masked(denominator_T, mask_T)
    return log_ratio_T.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()
