"""Digests of files and of choices: the same wherever the files lie, another when a byte changes."""

import hashlib
import json
from pathlib import Path
from typing import Any


def file_digest(path: Path) -> str:
    """Digest of the file's bytes; raises ValueError when it cannot be read."""
    try:
        with path.open("rb") as opened:
            return hashlib.file_digest(opened, _blake2b).hexdigest()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def digest_of(choices: dict[str, Any], arrays: list[bytes]) -> str:
    """Digest of plain values and of raw arrays."""
    digest = _blake2b(json.dumps(choices, sort_keys=True).encode())
    for array in arrays:
        digest.update(len(array).to_bytes(8, "little"))
        digest.update(array)
    return digest.hexdigest()


def _blake2b(content: bytes = b"") -> hashlib.blake2b:
    return hashlib.blake2b(content, digest_size=16)
