"""Groups of scored steps, written as lists: one score a step, two tokens each."""

import math
import random

import torch

from megatron_credit.credit import METHODS, Group


def step_group(scores, *, rewards=None):
    """The first token of a step is trained, the second must not be read; a score may be NaN."""
    num, num_steps = len(scores), max(map(len, scores))
    score_NS = torch.full((num, num_steps), math.nan, dtype=torch.float64)
    id_NT = torch.full((num, 2 * num_steps), 99)
    id_NT[:, ::2] = -1
    for row, score_S in enumerate(scores):
        score_NS[row, : len(score_S)] = torch.tensor(score_S, dtype=torch.float64)
        id_NT[row, : 2 * len(score_S) : 2] = torch.arange(len(score_S))
    mask_NT = torch.ones_like(id_NT, dtype=torch.bool)
    mask_NT[:, 1::2] = False
    return Group(
        reward_N=torch.tensor([0.0] * num if rewards is None else rewards, dtype=torch.float64),
        mask_NT=mask_NT,
        step_id_NT=id_NT,
        step_score_NS=score_NS,
    )


def exact_advantages(name, group, **options):
    """[N, S] float64: of each step's trained token, before rounding to float32."""
    return METHODS[name].configure(options).credit(group).advantage_NT[:, ::2]


def random_scores(rng: random.Random):
    """Two to six rollouts of up to four steps, on a coarse grid so that ties occur."""
    num = rng.randint(2, 6)
    return [[rng.randint(0, 8) / 8 for _ in range(rng.randint(0, 4))] for _ in range(num)]


def standardise(values):
    """Lists of rows by their common population mean and std; pure Python."""
    flat = [value for row in values for value in row]
    mean = sum(flat) / max(len(flat), 1)
    std = math.sqrt(sum((value - mean) ** 2 for value in flat) / max(len(flat), 1))
    return [[0.0 if std < 1e-8 else (value - mean) / std for value in row] for row in values]


def assert_steps(advantage_NS, expected, tolerance=1e-12):
    """The rows of `expected` are as long as the rollouts; what follows must be 0."""
    expected_NS = torch.zeros_like(advantage_NS)
    for row, values in enumerate(expected):
        expected_NS[row, : len(values)] = torch.tensor(values, dtype=advantage_NS.dtype)
    torch.testing.assert_close(advantage_NS, expected_NS, rtol=0, atol=tolerance)
