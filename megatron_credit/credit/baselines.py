"""Sequence-level advantages: one number a rollout, the base of the token-level methods."""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Base = Literal["grpo", "dr_grpo", "rloo"]

STD_FLOOR = 1e-6


def has_verdict(reward_N: Tensor) -> Tensor:
    """[N] bool: the reward is a finite number."""
    return torch.isfinite(reward_N)


def is_verified(reward_N: Tensor) -> Tensor:
    """[N] bool: a valid reward of at least 0.5."""
    return has_verdict(reward_N) & (reward_N >= 0.5)


def is_wrong(reward_N: Tensor) -> Tensor:
    """[N] bool: a valid reward below 0.5."""
    return has_verdict(reward_N) & (reward_N < 0.5)


def sequence_advantage(base: Base, reward_N: Tensor) -> Tensor:
    """[N] float64: the advantage of each rollout under the named baseline.

    Rollouts without a verdict are left out of every statistic and get 0. Exactly 0 for all when the
    valid rewards are equal or fewer than two. A rollout with no trained token counts.
    """
    valid_N = has_verdict(reward_N)
    advantage_N = torch.zeros(reward_N.shape, dtype=torch.float64, device=reward_N.device)
    reward_R = reward_N[valid_N].double()
    if len(reward_R) >= 2 and reward_R.max() > reward_R.min():
        advantage_N[valid_N] = _BASES[base](*_centred(reward_R))
    return advantage_N


def _centred(reward_R: Tensor) -> tuple[Tensor, float]:
    """R - mean in multiples of a unit, and the unit: the power of two below the largest |R|."""
    # Division by a power of two is exact, and squares of rewards above 1e154 no longer overflow.
    unit = math.ldexp(1.0, math.frexp(float(reward_R.abs().max()))[1] - 1)
    scaled_R = reward_R / unit
    # The mean of rewards that differ in their last digits only would lose the difference.
    shifted_R = scaled_R - scaled_R.min()
    return shifted_R - shifted_R.mean(), unit


def _grpo(centred_R: Tensor, unit: float) -> Tensor:
    """Centred and divided by the unbiased std (2402.03300)."""
    return centred_R / (centred_R.std() + STD_FLOOR / unit)


def _dr_grpo(centred_R: Tensor, unit: float) -> Tensor:
    """Centred only (2503.20783)."""
    return centred_R * unit


def _rloo(centred_R: Tensor, unit: float) -> Tensor:
    """Minus the mean of the others, which is n / (n - 1) times the centred reward."""
    return centred_R * unit * (len(centred_R) / (len(centred_R) - 1))


_BASES: dict[Base, Callable[[Tensor, float], Tensor]] = {
    "grpo": _grpo,
    "dr_grpo": _dr_grpo,
    "rloo": _rloo,
}


def spread(advantage_N: Tensor, mask_NT: Tensor) -> Tensor:
    """[N, T] float64: each rollout's advantage on its trained tokens, 0 elsewhere."""
    return torch.where(mask_NT, advantage_N[:, None], 0.0)
