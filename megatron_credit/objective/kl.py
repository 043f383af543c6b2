"""Estimators of KL(policy || reference) from the sampled token alone."""

from typing import Literal

import torch
from torch import Tensor

from megatron_credit.objective.ratio import MAX_EXPONENT

Estimator = Literal["k1", "k2", "k3"]


def kl_estimate(policy_logprob_T: Tensor, reference_logprob_T: Tensor, kind: Estimator) -> Tensor:
    """The estimate for each token, in nats, from x = log policy - log reference of that token.

    k1 = x: unbiased, may be negative. k2 = x^2 / 2: biased, small variance, its gradient estimates
    that of the KL. k3 = exp(-x) - 1 + x: unbiased and never negative; x counts as at least -20, so
    that value and gradient are finite at any distance.
    """
    log_ratio_T = policy_logprob_T - reference_logprob_T
    if kind == "k1":
        return log_ratio_T
    if kind == "k2":
        return 0.5 * log_ratio_T**2
    # Bounding the exponent alone would leave a gradient of the wrong sign beyond the bound.
    bounded_T = log_ratio_T.clamp(min=-MAX_EXPONENT)
    # exp(-x) - 1 of a small x would round to noise larger than the estimate, and below 0.
    return torch.expm1(-bounded_T) + bounded_T
