"""Small files that are on disk, not only in memory, when the call returns."""

import os
from pathlib import Path


def write_durably(path: Path, text: str) -> None:
    """Writes a file whose name may still be lost: see `sync_directory`."""
    with path.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def sync_directory(directory: Path) -> None:
    """The names in a directory are on disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
