"""The one place that chooses a backend."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import torch

from credit_kernels.targets import refusal

Implementation = TypeVar("Implementation")

FEW_TOKENS = 128
"""Rows of one tile. For so few, reading the weight takes longer than the products."""
SMALLEST_CHUNK = 1024
"""Rows of a chunk below which the products of `rows` no longer fill a GPU."""


@dataclass(frozen=True)
class Work:
    """What the choice of a backend depends on."""

    device: torch.device
    dtype: torch.dtype
    num_tokens: int
    num_columns: int


def chunk_bytes(device: torch.device) -> int:
    """Memory that a backend may take for a chunk of logits.

    A part of what the device has, not of what is free: the size of a chunk, and with it the
    rounding, must not differ between scoring and training.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory // 32
    return 2**26


def choose(
    requested: str,
    built: Mapping[str, Implementation],
    *,
    operation: str,
    work: Work | None = None,
) -> Implementation:
    """The implementation that will run, of those that an operation has by backend name.

    `auto` is told once for every operation and choice in the log. Without `work` it is `torch`.

    Raises ValueError for an unknown backend, one that the operation lacks, or one that cannot run
    on this work; never falls back.
    """
    if requested == "auto":
        name, reason = _best(work)
        if name not in built:  # tiles cannot serve this call, or nothing of Triton is built
            reason = f"{operation} has no {name} for this"
            name = "rows" if "rows" in built else "torch"
        _tell(operation, name, reason)
        return built[name]
    if requested not in built:
        raise ValueError(
            f"backend={requested!r} is not available for {operation}; use one of {['auto', *built]}"
        )
    problem = None if requested == "torch" or work is None else _triton_problem(work)
    if problem is not None:
        raise ValueError(f"backend={requested!r} cannot run {operation}: {problem}")
    return built[requested]


def _triton_problem(work: Work) -> str | None:
    if work.dtype == torch.float64:
        return "the Triton kernels compute in float32; use backend='torch' for float64"
    return refusal(work.device)


def _best(work: Work | None) -> tuple[str, str]:
    """Name of the backend to prefer, and why. No GPU has been measured yet."""
    if work is None:
        return "torch", "there is no other yet"
    if work.device.type == "cpu":
        return "torch", "a processor runs it fastest"
    problem = _triton_problem(work)
    if problem is not None:
        return "torch", problem
    if work.num_tokens <= FEW_TOKENS:
        return "tiles", "for few tokens the way of the logits through memory only adds to reading"
    # float32 logits and their gradient in the type of the inputs.
    row_bytes = work.num_columns * (4 + work.dtype.itemsize)
    if chunk_bytes(work.device) < SMALLEST_CHUNK * row_bytes:
        return "tiles", f"{SMALLEST_CHUNK} rows of logits would take too much of the memory"
    return "rows", "the vendor's matrix products are expected to be the fastest"


@cache
def _tell(operation: str, name: str, reason: str) -> None:
    logging.getLogger("credit_kernels").info("%s: backend %s (%s)", operation, name, reason)
