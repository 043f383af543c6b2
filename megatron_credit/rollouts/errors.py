"""Errors of the rollout side."""

from pathlib import Path

LOG_LINES = 20


class EngineError(RuntimeError):
    """An engine died, hangs, or refused what it was asked; the message names it and what it did."""


def log_tail(path: Path | None) -> str:
    """The end of an engine's log as a part of an error message; empty where there is none."""
    if path is None or not path.is_file():
        return ""
    lines = path.read_text(errors="replace").splitlines()[-LOG_LINES:]
    return "\n".join([f"\nthe end of {path}:", *(f"  {line}" for line in lines)])
