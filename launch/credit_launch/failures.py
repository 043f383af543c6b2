"""Why an attempt failed: what a task wrote down, else the end of its log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from credit_launch.files import AttemptFiles, read_json

LAST_LINES = 15
READ_BYTES = 200_000
"""From the end of a log."""


def failure_of(attempt: AttemptFiles) -> tuple[str, bool] | None:
    """The reason that somebody wrote down, and whether another try may help."""
    found = read_json(attempt.failure)
    if not found:
        return None
    return str(found.get("reason", "no reason given")), bool(found.get("retry", True))


def end_of_log(paths: Sequence[Path]) -> str:
    """The last lines of one of a task's logs: of a node with a traceback where there is one."""
    texts = {path: _tail(path) for path in paths if path.is_file()}
    if not texts:
        return f"there is no log {paths[0]}"
    guilty = [path for path, text in texts.items() if "Traceback" in text]
    path = (guilty or [path for path, text in texts.items() if text.strip()] or list(texts))[0]
    lines = texts[path].splitlines()[-LAST_LINES:]
    return "\n".join([f"the end of {path}:", *(f"  {line}" for line in lines)])


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - READ_BYTES))
        return file.read().decode(errors="replace")
