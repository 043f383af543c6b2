"""How the losses of an optimizer step are weighted and what their sum is divided by."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_credit.objective.config import ObjectiveConfig


@dataclass(frozen=True, kw_only=True)
class Normaliser:
    """Loss of the step = sum over rollouts of weight x (sum of the token losses), over `count`.

    It is made from the whole optimizer step, so how the step is cut into ranks and micro-batches
    cannot change the result.
    """

    weight_N: list[float]
    """Weight of each trained token of rollout i."""
    count: float
    """The one divisor; at least 1."""


def normaliser(num_trained_N: Sequence[int], config: ObjectiveConfig) -> Normaliser:
    """The normaliser of a step whose rollouts have these numbers of trained tokens."""
    if config.normalisation == "sequence_mean":
        weight_N = [1.0 / max(trained, 1) for trained in num_trained_N]
        count = sum(trained > 0 for trained in num_trained_N)
    else:
        weight_N = [1.0] * len(num_trained_N)
        count = (
            sum(num_trained_N)
            if config.normalisation == "token_mean"
            else len(num_trained_N) * (config.constant_length or 0)
        )
    return Normaliser(weight_N=weight_N, count=float(max(count, 1)))
