"""Secrets: read from files that only their owner may read, handed on by the environment."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

_LINE = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)")


def require_private(path: Path) -> None:
    """ValueError where the file is missing, or others may read or change it."""
    try:
        found = path.stat()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path} is no file; secrets are lines NAME=VALUE in a file")
    if found.st_uid != os.getuid():
        raise ValueError(f"{path} belongs to another user; secrets must be in a file of yours")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise ValueError(
            f"{path} may be read by others (mode {stat.S_IMODE(found.st_mode):04o}); "
            f"chmod 600 {path}"
        )


def read_secrets(path: Path) -> dict[str, str]:
    """The variables of a secrets file; ValueError names the line that is none, never its text."""
    require_private(path)
    found = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise ValueError(f"{path}: line {number} is not of the form NAME=VALUE")
        found[match[1]] = _unquoted(match[2])
    return found


def read_key(path: Path) -> str:
    """The key in a private file."""
    require_private(path)
    key = path.read_text().strip()
    if not key:
        raise ValueError(f"{path} is empty; delete it and launch again")
    return key


def _unquoted(value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        return value[1:-1]
    return value
