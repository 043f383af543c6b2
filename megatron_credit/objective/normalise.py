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
    selected_weight: float | None = None
    """Weight of the selected tokens instead, where they have a mean of their own."""


def normaliser(
    num_trained_N: Sequence[int],
    config: ObjectiveConfig,
    num_selected_N: Sequence[int] | None = None,
) -> Normaliser:
    """The normaliser of a step whose rollouts have these numbers of trained tokens.

    With `num_selected_N`, how many of them are selected, the loss is the mean over the selected
    tokens of the step plus the mean over the others; a mean over none is 0. ValueError for that
    under another normalisation than token_mean.
    """
    if num_selected_N is not None:
        return _two_means(num_trained_N, num_selected_N, config)
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


def _two_means(
    num_trained_N: Sequence[int], num_selected_N: Sequence[int], config: ObjectiveConfig
) -> Normaliser:
    if config.normalisation != "token_mean":
        raise ValueError(
            f"normalisation={config.normalisation!r} with tokens that are averaged apart from the "
            "others (selected_T); these means are over the tokens of the step, so set "
            "normalisation='token_mean'"
        )
    count = float(max(sum(num_trained_N), 1))
    selected = sum(num_selected_N)
    others = sum(num_trained_N) - selected
    return Normaliser(
        weight_N=[count / max(others, 1)] * len(num_trained_N),
        count=count,
        selected_weight=count / max(selected, 1),
    )
