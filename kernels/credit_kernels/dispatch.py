"""The one place that chooses a backend."""

from typing import Literal

Backend = Literal["auto", "torch", "rows", "tiles"]

AVAILABLE: tuple[Backend, ...] = ("torch",)
"""Backends that are built; `rows` and `tiles` are the names of the Triton ones to come."""


def choose_backend(requested: str) -> Backend:
    """The backend that will run; ValueError for an unknown or unbuilt one, never a fallback."""
    if requested == "auto":
        return "torch"
    if requested not in AVAILABLE:
        raise ValueError(
            f"backend={requested!r} is not available; use 'auto' or one of {list(AVAILABLE)}"
        )
    return requested
