"""What the trainer's forward passes tell of response tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from megatron_credit.batch.sequence import TrainSequence


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Of each response token of one sequence, float32 on the CPU: log-prob and entropy in nats.

    NaN where no pass was made.
    """

    logprob_T: Tensor
    entropy_T: Tensor

    @classmethod
    def unknown(cls, sequence: TrainSequence) -> Self:
        """For a sequence that went through no pass."""
        nothing_T = torch.full((sequence.num_response,), math.nan)
        return cls(logprob_T=nothing_T, entropy_T=nothing_T)


@dataclass(frozen=True, kw_only=True)
class Update:
    """What one optimizer step did, and what the weights before it say of each sequence."""

    metrics: dict[str, float]
    scored: Sequence[Scored]
