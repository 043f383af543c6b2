"""Random groups whose rows may lack evidence, and the slow arithmetic of their oracles."""

import math
import random
from statistics import mean, stdev

import pytest
import torch

from megatron_credit.credit import METHODS, Group
from megatron_credit.credit.evidence import pick_references

NAN = math.nan
REWARDS = [
    [0.0, 1.0],
    [0.0, 1.0, NAN],
    [0.0],
    [1.0],
    [0.0, 0.2, 0.4, NAN],
    [0.0, 0.2, 0.5, 1.0, math.inf],
]
SIGNALS = {
    "policy_logprob_NT": (-3.0, 0.0),
    "positive_logprob_NT": (-3.0, 0.0),
    "negative_logprob_NT": (-3.0, 0.0),
    "teacher_logprob_NT": (-3.0, 0.0),
    "teacher_kl_NT": (0.0, 2.0),
    "contrast_target_NT": (-0.5, 0.5),
    "contrast_mean_NT": (-0.1, 0.1),
    "contrast_cost_NT": (-0.001, 0.2),
}


def small_group(rewards, *, step=1, kl_scale=None, **signals):
    """A group from lists, every token trained."""
    first = next(iter(signals.values()))
    tensors = {
        name: torch.tensor(values, dtype=torch.int64 if name.endswith("_N") else torch.float64)
        for name, values in signals.items()
    }
    return Group(
        reward_N=torch.tensor(rewards, dtype=torch.float64),
        mask_NT=torch.ones(len(rewards), len(first[0]), dtype=torch.bool),
        step=step,
        kl_scale=kl_scale,
        **tensors,
    )


def random_group(seed):
    """One to seven rollouts; rows without evidence, NaN outside the mask, masked-out tokens."""
    rng = random.Random(seed)
    num, num_tokens = rng.randint(1, 7), rng.randint(1, 6)
    reward_N = torch.tensor(rng.choices(rng.choice(REWARDS), k=num), dtype=torch.float64)
    mask_NT = torch.tensor([[rng.random() < 0.7 for _ in range(num_tokens)] for _ in range(num)])
    reference_N = pick_references(reward_N, seed=seed)

    def signal(low, high):
        rows = [[rng.uniform(low, high) for _ in range(num_tokens)] for _ in range(num)]
        for row in rows:
            if rng.random() < 0.15:
                row[rng.randrange(num_tokens)] = rng.choice([NAN, math.inf, -math.inf])
        return torch.tensor(rows, dtype=torch.float64).where(mask_NT, torch.nan)

    signals = {name: signal(*bounds) for name, bounds in SIGNALS.items()}
    return Group(
        reward_N=reward_N,
        mask_NT=mask_NT,
        step=rng.randint(1, 60),
        reference_index_N=reference_N,
        **signals,
    )


def baseline(kind, rewards):
    """Section 0 of the specification, with NaN or infinity for no verdict."""
    valid = [reward for reward in rewards if math.isfinite(reward)]
    if len(valid) < 2 or min(valid) == max(valid):
        return [0.0] * len(rewards)
    scale = {"grpo": stdev(valid) + 1e-6, "dr_grpo": 1.0, "rloo": 1 - 1 / len(valid)}[kind]
    return [(r - mean(valid)) / scale if math.isfinite(r) else 0.0 for r in rewards]


def trained(group, name):
    """A list for each rollout: the signal's values on its trained tokens."""
    rows = zip(vars(group)[name], group.mask_NT, strict=True)
    return [value_T[mask_T].tolist() for value_T, mask_T in rows]


def finite(*lists):
    """Whether every value of these lists is finite."""
    return all(math.isfinite(value) for values in lists for value in values)


def assert_trained(value_NT, mask_NT, expected):
    """Compares with one list a rollout for its trained tokens; the other tokens must have 0."""
    assert value_NT[~mask_NT].eq(0).all()
    for value_T, mask_T, values in zip(value_NT, mask_NT, expected, strict=True):
        assert value_T[mask_T].tolist() == pytest.approx(values, rel=1e-6, abs=1e-6)


def exact(name, group, **options):
    """[N, T] float64 as nested lists: the advantages before rounding to float32."""
    return METHODS[name].configure(options).credit(group).advantage_NT.tolist()
