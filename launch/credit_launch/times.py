"""Slurm's time limits in seconds."""

from __future__ import annotations

import re

_DAYS = re.compile(r"(\d+)-(\d+)(?::(\d+)(?::(\d+))?)?")
_CLOCK = re.compile(r"(\d+)(?::(\d+)(?::(\d+))?)?")


def seconds_of(limit: str) -> int | None:
    """Seconds of minutes, minutes:seconds, hours:minutes:seconds, days-hours,
    days-hours:minutes or days-hours:minutes:seconds; None for a job without limit.

    ValueError for anything else, and for a limit of nothing.
    """
    if limit.lower() in ("unlimited", "infinite"):
        return None
    seconds = _seconds(limit)
    if seconds == 0:
        raise ValueError(f"time = {limit!r} leaves no time to run; give minutes or hours")
    return seconds


def _seconds(limit: str) -> int:
    days = _DAYS.fullmatch(limit)
    if days:
        day, hour, minute, second = (int(part or 0) for part in days.groups())
        return ((day * 24 + hour) * 60 + minute) * 60 + second
    clock = _CLOCK.fullmatch(limit)
    if clock is None:
        raise ValueError(
            f"time = {limit!r} is no time limit; expected minutes, hours:minutes:seconds, "
            "days-hours or days-hours:minutes:seconds, such as 90, 24:00:00 or 2-12"
        )
    first, second, third = clock.groups()
    if third is not None:
        return (int(first) * 60 + int(second)) * 60 + int(third)
    return int(first) * 60 + int(second or 0)


def in_words(seconds: float) -> str:
    """A duration for people: 42 s, 3 min 5 s, 2 h 10 min, 3 d 4 h."""
    whole = int(seconds)
    for name, size, lower, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60)):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // part} {lower}"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"
