"""The loss weight of every token of an optimizer step, and what the step is divided by."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_credit.batch.sequence import TrainSequence, all_or_none
from megatron_credit.objective.config import ObjectiveConfig
from megatron_credit.objective.normalise import normaliser


@dataclass(frozen=True, kw_only=True, eq=False)
class StepWeights:
    """Loss of the step = sum over its trained tokens of weight x loss, over `count`."""

    weights: list[Tensor]
    """Of each sequence, float32 [T]."""
    count: float


def step_weights(sequences: Sequence[TrainSequence], config: ObjectiveConfig) -> StepWeights:
    """The weights of these sequences, the whole optimizer step.

    ValueError where only some sequences say which tokens are selected, or where they do and the
    normalisation is another than token_mean.
    """
    split = all_or_none([sequence.selected_T for sequence in sequences], "selected_T")
    norm = normaliser(
        [sequence.num_trained for sequence in sequences],
        config,
        [sequence.num_selected for sequence in sequences] if split else None,
    )
    weights = []
    for sequence, weight in zip(sequences, norm.weight_N, strict=True):
        weight_T = torch.full((sequence.num_response,), weight)
        if sequence.selected_T is not None and norm.selected_weight is not None:
            weight_T[sequence.selected_T] = norm.selected_weight
        weights.append(weight_T)
    return StepWeights(weights=weights, count=norm.count)
