"""Chains of attempts: who reached and passed which attempt, and what an attempt is worth.

A rollout tries again in the same context after each failure and stops at its first pass; it is won
if it passed at all (Verification@K). The method is CAL-GRPO (2604.17912), which has no public full
text or code: the weights here are derived from its abstract and checked by enumeration.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_credit.credit.baselines import STD_FLOOR, has_verdict, sequence_advantage
from megatron_credit.credit.columns import trained_ids
from megatron_credit.credit.group import Group

Singleton = Literal["zero", "return"]
Scale = Literal["none", "prompt_std"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Attempts:
    """The attempts of a group; a rollout without a verdict has reached none."""

    valid_N: Tensor
    """[N] bool: has a verdict."""
    id_NT: Tensor
    """[N, T] int64: attempt of each trained token, -1 outside."""
    reached_NK: Tensor
    """[N, K] bool."""
    passed_NK: Tensor
    """[N, K] bool."""

    @property
    def won_N(self) -> Tensor:
        """[N] bool: passed any attempt."""
        return self.passed_NK.any(dim=1)

    @property
    def alone_K(self) -> Tensor:
        """[K] bool: a single rollout reached the attempt, so it has nobody to be compared with."""
        return self.reached_NK.sum(dim=0) == 1


def read_attempts(group: Group) -> Attempts:
    """The group's chains; ValueError for a verdict other than 1, 0 and NaN."""
    id_NT, pass_NK = group.attempt_id_NT, group.attempt_pass_NK
    assert id_NT is not None and pass_NK is not None
    valid_N = has_verdict(group.reward_N)
    reached_NK = ~pass_NK.isnan() & valid_N[:, None]
    verdicts = pass_NK[reached_NK]
    strange = verdicts[(verdicts != 0) & (verdicts != 1)]
    if len(strange):
        raise ValueError(
            f"attempt_pass_NK has {float(strange[0])}; expected 1 (passed), 0 (failed) or NaN (not "
            f"reached)"
        )
    trained_NT = group.mask_NT & valid_N[:, None]
    return Attempts(
        valid_N=valid_N,
        id_NT=trained_ids("attempt_id_NT", id_NT, trained_NT, pass_NK.shape[1]),
        reached_NK=reached_NK,
        passed_NK=reached_NK & (pass_NK == 1),
    )


def attempt_weight(attempts: Attempts) -> Tensor:
    """[K] float64: the share of the rollouts that failed an attempt which never passed a later one.

    It is what a pass at this attempt adds: little where a failure would have been rescued. 1 where
    nobody failed.
    """
    failed_NK = attempts.reached_NK & ~attempts.passed_NK
    num_failed_K = failed_NK.sum(dim=0).double()
    num_lost_K = (failed_NK & ~attempts.won_N[:, None]).sum(dim=0)
    return torch.where(num_failed_K > 0, num_lost_K / num_failed_K.clamp(min=1), 1.0)


def against_others(outcome_NK: Tensor, attempts: Attempts, singleton: Singleton) -> Tensor:
    """[N, K] float64: the outcome minus its mean over the others that reached the attempt.

    0 where the rollout did not reach it. Where nobody else did, 0 or whether the rollout was won.
    """
    reached_NK = attempts.reached_NK
    outcome_NK = outcome_NK.double().where(reached_NK, 0.0)
    num_others_K = reached_NK.sum(dim=0) - 1
    others_NK = (outcome_NK.sum(dim=0) - outcome_NK) / num_others_K.clamp(min=1)
    alone_NK = reached_NK & attempts.alone_K
    baseline_NK = torch.where(alone_NK, outcome_NK, others_NK)
    advantage_NK = torch.where(reached_NK, outcome_NK - baseline_NK, 0.0)
    if singleton == "return":
        return torch.where(alone_NK, attempts.won_N[:, None].double(), advantage_NK)
    return advantage_NK


def prompt_scale(attempts: Attempts, scale: Scale) -> float:
    """The factor on every advantage of the group: 1, or 1 / (std of won + 1e-6), 0 if all equal."""
    if scale == "none":
        return 1.0
    won_R = attempts.won_N[attempts.valid_N].double()
    return 0.0 if won_R.min() == won_R.max() else 1 / (float(won_R.std()) + STD_FLOOR)


def trajectory_advantage(attempts: Attempts) -> Tensor:
    """[N, K] float64: GRPO on won or not, the same for each attempt that a rollout reached."""
    outcome_N = torch.where(attempts.valid_N, attempts.won_N.double(), torch.nan)
    advantage_N = sequence_advantage("grpo", outcome_N)
    return torch.where(attempts.reached_NK, advantage_N[:, None], 0.0)


def attempt_metrics(attempts: Attempts) -> dict[str, float]:
    """What happened in the attempts that somebody reached, and to the rollouts."""
    weight_K = attempt_weight(attempts)[attempts.reached_NK.any(dim=0)]
    if not len(weight_K):
        weight_K = weight_K.new_ones(1)
    num_valid = int(attempts.valid_N.sum())
    return {
        "credit/attempt_weight_mean": float(weight_K.mean()),
        "credit/attempt_weight_min": float(weight_K.min()),
        "credit/attempts_of_one": float(attempts.alone_K.sum()),
        "credit/attempts_mean": float(attempts.reached_NK.sum()) / num_valid,
        "credit/verification_at_k": float(attempts.won_N.sum()) / num_valid,
    }
