"""Refusals of inputs that do not fit together; every message shows both sides."""

import math

import torch
from torch import Tensor

from credit_kernels.vocab_parallel import VocabShard


def check_head(
    hidden: Tensor, weight_VH: Tensor, target_T: Tensor, shard: VocabShard, letters: str
) -> None:
    """ValueError unless hidden, whose axes are the letters, ends in T and H as the others say."""
    shapes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight_VH.shape)}"
    fits = hidden.dim() == len(letters) and weight_VH.dim() == 2
    if not fits or hidden.shape[-1] != weight_VH.shape[1]:
        raise ValueError(f"{shapes}: expected [{', '.join(letters)}] and [V, H]")
    if target_T.shape != hidden.shape[-2:-1] or target_T.dtype != torch.int64:
        raise ValueError(
            f"target has shape {tuple(target_T.shape)} and type {target_T.dtype}; expected "
            f"({hidden.shape[-2]},) and torch.int64"
        )
    if not (hidden.is_floating_point() and hidden.dtype == weight_VH.dtype):
        raise ValueError(
            f"hidden is {hidden.dtype} and weight {weight_VH.dtype}; expected one floating type"
        )
    if not hidden.device == weight_VH.device == target_T.device:
        raise ValueError(
            f"hidden is on {hidden.device}, weight on {weight_VH.device}, target on "
            f"{target_T.device}; expected one device"
        )
    if weight_VH.shape[0] != shard.num_rows:
        raise ValueError(
            f"weight has {weight_VH.shape[0]} rows, but the shard {shard.start}..{shard.stop} has "
            f"{shard.num_rows}"
        )
    if shard.group is None and shard.num_columns < shard.total:
        raise ValueError(
            f"the shard holds {shard.num_columns} of {shard.total} columns and has no group to "
            "find the others in"
        )


def check_scale(temperature: float, softcap: float | None) -> None:
    """ValueError unless both are positive and finite, or the cap is None."""
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature}; expected a positive number")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap={softcap}; expected a positive number, or None for no cap")
