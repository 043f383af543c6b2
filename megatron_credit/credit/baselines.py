"""Sequence-level advantages: one number a rollout, the base of the token-level methods."""

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
    valid rewards are equal or fewer than two.
    """
    valid_N = has_verdict(reward_N)
    advantage_N = torch.zeros(reward_N.shape, dtype=torch.float64, device=reward_N.device)
    reward_V = reward_N[valid_N].double()
    if len(reward_V) >= 2 and reward_V.max() > reward_V.min():
        advantage_N[valid_N] = _BASES[base](reward_V)
    return advantage_N


def _grpo(reward_V: Tensor) -> Tensor:
    """Centred and divided by the unbiased std (2402.03300)."""
    return (reward_V - reward_V.mean()) / (reward_V.std() + STD_FLOOR)


def _dr_grpo(reward_V: Tensor) -> Tensor:
    """Centred only (2503.20783)."""
    return reward_V - reward_V.mean()


def _rloo(reward_V: Tensor) -> Tensor:
    """Minus the mean of the others."""
    return reward_V - (reward_V.sum() - reward_V) / (len(reward_V) - 1)


_BASES: dict[Base, Callable[[Tensor], Tensor]] = {
    "grpo": _grpo,
    "dr_grpo": _dr_grpo,
    "rloo": _rloo,
}


def spread(advantage_N: Tensor, mask_NT: Tensor) -> Tensor:
    """[N, T]: each rollout's advantage on its trained tokens, 0 elsewhere."""
    return torch.where(mask_NT, advantage_N[:, None], 0.0)
