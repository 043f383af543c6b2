"""Size and CRC-32 of files, and whether a checkpoint's are what was written."""

import os
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron_credit.mcore.manifest import DamagedCheckpoint, read_manifest

_BLOCK = 1 << 24
_FEWEST_READERS, _MOST_READERS = 4, 16


def verify(directory: Path, expected: Mapping[str, str]) -> dict[str, Any]:
    """The manifest of a checkpoint that is whole: every byte is read, by threads of this process.

    ValueError as in `read_manifest`; DamagedCheckpoint where a file is not what was written, or
    holds a pickle with more than data.
    """
    # Imports torch's checkpoints: not for who has none to read.
    from megatron_credit.mcore.vetting import check_pickles

    manifest = read_manifest(directory, expected)
    files: dict[str, str] = manifest["files"]
    # zlib and the file system let other threads run meanwhile.
    num_readers = min(max(len(os.sched_getaffinity(0)), _FEWEST_READERS), _MOST_READERS)
    with ThreadPoolExecutor(num_readers) as readers:
        found = readers.map(lambda name: readable(directory / name), files)
        refuse_altered(directory, files, dict(zip(files, found, strict=True)))
    check_pickles(directory)
    return manifest


def readable(path: Path) -> str:
    """What the manifest says of such a file, or why it cannot be read."""
    try:
        return digest(path)
    except OSError as error:
        return f"unreadable: {error.strerror}"


def refuse_altered(directory: Path, files: Mapping[str, str], found: Mapping[str, str]) -> None:
    """DamagedCheckpoint where what was found is not what the manifest says."""
    altered = [f"{name} ({found[name]})" for name in files if found[name] != files[name]]
    if altered:
        raise DamagedCheckpoint(
            f"checkpoint {directory} is damaged: {', '.join(altered)} is not what was written; "
            "use another checkpoint"
        )


def digest(path: Path) -> str:
    """Size and CRC-32 in the words of a manifest; OSError where the file cannot be read."""
    crc, size = 0, 0
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return f"{size} bytes, crc32 {crc:08x}"
