"""The clipped surrogate of PPO (1707.06347) with separate clips (2503.14476)."""

import torch
from torch import Tensor


def clipped_surrogate(
    ratio_T: Tensor, advantage_T: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A) of each token.

    The gradient in log p is -ratio A where the unclipped side is the smaller, else 0.
    """
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio_T * advantage_T, clipped_T * advantage_T)


def clip_hits(
    ratio_T: Tensor, advantage_T: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """bool, bool: tokens whose gradient the lower and the upper clip removed."""
    low_T = (ratio_T < 1 - clip_low) & (advantage_T < 0)
    high_T = (ratio_T > 1 + clip_high) & (advantage_T > 0)
    return low_T, high_T
