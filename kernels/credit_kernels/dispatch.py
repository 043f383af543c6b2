"""The one place that chooses a backend."""

from collections.abc import Mapping
from typing import TypeVar

Implementation = TypeVar("Implementation")

AUTO_ORDER = ("torch",)
"""What `auto` takes, the first that the operation has."""


def choose(
    requested: str, built: Mapping[str, Implementation], *, operation: str
) -> Implementation:
    """The implementation that will run, of those that an operation has by backend name.

    Raises ValueError for an unknown backend or one that the operation lacks; never falls back.
    """
    if requested == "auto":
        return next(built[name] for name in AUTO_ORDER if name in built)
    if requested not in built:
        raise ValueError(
            f"backend={requested!r} is not available for {operation}; use one of {['auto', *built]}"
        )
    return built[requested]
