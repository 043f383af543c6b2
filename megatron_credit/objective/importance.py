"""Correction for an engine whose log-probs are not quite the trainer's, for the same weights."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_credit.objective.ratio import probability_ratio


@dataclass(frozen=True, kw_only=True, eq=False)
class Correction:
    """A factor for each token's loss, without gradient, and which tokens it changed."""

    weight_T: Tensor
    changed_T: Tensor
    """bool: truncated or dropped."""


def importance_correction(
    old_logprob_T: Tensor,
    rollout_logprob_T: Tensor,
    mask_T: Tensor,
    *,
    kind: Literal["none", "truncate", "mask"],
    cap: float,
) -> Correction:
    """With r = exp(old - rollout): min(r, cap), or 1 for r in [1 / cap, cap] and 0 outside."""
    ratio_T = probability_ratio(old_logprob_T.detach(), rollout_logprob_T, mask_T)
    if kind == "truncate":
        return Correction(weight_T=ratio_T.clamp(max=cap), changed_T=mask_T & (ratio_T > cap))
    if kind == "mask":
        outside_T = mask_T & ((ratio_T > cap) | (ratio_T < 1 / cap))
        return Correction(weight_T=(~outside_T).to(ratio_T.dtype), changed_T=outside_T)
    return Correction(weight_T=torch.ones_like(ratio_T), changed_T=torch.zeros_like(mask_T))
