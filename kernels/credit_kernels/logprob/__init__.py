"""Log-prob and entropy of target tokens from hidden states; the logits are never held."""

import math

import torch
from torch import Tensor

from credit_kernels.dispatch import choose
from credit_kernels.logprob.chunked import LinearLogprob
from credit_kernels.vocab_parallel import VocabShard

BACKENDS = {"torch": LinearLogprob.apply}
"""Implementations by backend name; `dispatch` chooses."""


def linear_logprob(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    target_T: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    shard: VocabShard | None = None,
    backend: str = "auto",
    return_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """logprob_T, or (logprob_T, entropy_T) with `return_entropy`, in nats.

    logits = softcap(hidden @ weight.T) / temperature, in float32 whatever the inputs' type (float64
    for float64 inputs); softcap(z) is softcap tanh(z / softcap). `weight_VH` holds the rows
    shard.start..shard.stop-1 (default: the whole vocabulary); columns from shard.total on are
    padding. A target outside [0, total) makes an ignored row: 0 in both outputs, no gradient, its
    hidden state never read. Differentiable once, in hidden and weight, through both outputs. With a
    shard's group the gradient of hidden is this rank's part, to be summed over the group by the
    caller; two all-reduces forward, none backward. The same with and without gradient, bit for bit.

    `backend` is "torch" (tile by tile, on any device) or "auto", which takes the best there is.

    Raises ValueError for shapes, types, devices or numbers that do not fit together, and for a
    backend that is not available.
    """
    shard = VocabShard.whole(weight_VH.shape[0]) if shard is None else shard
    _check(hidden_TH, weight_VH, target_T, shard)
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature}; expected a positive number")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap={softcap}; expected a positive number, or None for no cap")
    implementation = choose(backend, BACKENDS, operation="linear_logprob")
    logprob_T, entropy_T = implementation(
        hidden_TH, weight_VH, target_T, shard, temperature, softcap, return_entropy
    )
    return (logprob_T, entropy_T) if return_entropy else logprob_T


def _check(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor, shard: VocabShard) -> None:
    shapes = f"hidden {tuple(hidden_TH.shape)}, weight {tuple(weight_VH.shape)}"
    if hidden_TH.dim() != 2 or weight_VH.dim() != 2 or hidden_TH.shape[1] != weight_VH.shape[1]:
        raise ValueError(f"{shapes}: expected [T, H] and [V, H]")
    if target_T.shape != hidden_TH.shape[:1] or target_T.dtype != torch.int64:
        raise ValueError(
            f"target has shape {tuple(target_T.shape)} and type {target_T.dtype}; expected "
            f"({hidden_TH.shape[0]},) and torch.int64"
        )
    if not (hidden_TH.is_floating_point() and hidden_TH.dtype == weight_VH.dtype):
        raise ValueError(
            f"hidden is {hidden_TH.dtype} and weight {weight_VH.dtype}; expected one floating type"
        )
    if not hidden_TH.device == weight_VH.device == target_T.device:
        raise ValueError(
            f"hidden is on {hidden_TH.device}, weight on {weight_VH.device}, target on "
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
