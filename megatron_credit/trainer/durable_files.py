"""Files that other processes read while they are replaced."""

import os
from pathlib import Path


def publish(path: Path, text: str) -> None:
    """Replaces the file; readers, on other nodes too, see the old text or the new one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text)
    os.replace(partial, path)
