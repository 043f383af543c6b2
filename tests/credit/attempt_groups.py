"""Groups of attempt chains, written as text: "01" failed once and then passed."""

import math

import torch

from megatron_credit.credit import METHODS, Group


def chain_group(chains, *, rewards=None, num_attempts=None):
    """One trained token an attempt, each followed by a feedback token that must not be read."""
    num_attempts = max(map(len, chains)) if num_attempts is None else num_attempts
    shape = len(chains), num_attempts
    pass_NK = torch.full(shape, math.nan, dtype=torch.float64)
    id_NT = torch.full((shape[0], 2 * shape[1]), 99)
    id_NT[:, ::2] = -1
    for row, chain in enumerate(chains):
        pass_NK[row, : len(chain)] = torch.tensor([float(verdict) for verdict in chain])
        id_NT[row, : 2 * len(chain) : 2] = torch.arange(len(chain))
    mask_NT = torch.ones_like(id_NT, dtype=torch.bool)
    mask_NT[:, 1::2] = False
    rewards = [float("1" in chain) for chain in chains] if rewards is None else rewards
    return Group(
        reward_N=torch.tensor(rewards, dtype=torch.float64),
        mask_NT=mask_NT,
        attempt_id_NT=id_NT,
        attempt_pass_NK=pass_NK,
    )


def exact_advantages(name, group, **options):
    """[N, K] float64: of each attempt's trained token, before rounding to float32."""
    return METHODS[name].configure(options).credit(group).advantage_NT[:, ::2]
