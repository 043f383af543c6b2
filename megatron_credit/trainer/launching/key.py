"""The engines' key of a run: a file outside of the run directory that only its owner may read."""

import hashlib
import os
import secrets
from pathlib import Path

from credit_launch.private import read_key


def key_file(run: Path, directory: Path | None) -> Path:
    """Where the key of this run is kept."""
    place = directory or Path.home() / ".local" / "state" / "megatron-credit"
    return place / f"{hashlib.sha256(str(run).encode()).hexdigest()[:32]}.key"


def ensure_key(path: Path) -> None:
    """Makes the key unless there is one; ValueError where others may read it, or nobody may write.
    A run keeps its key: engines of an earlier attempt may still be ending."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        read_key(path)
        return
    except OSError as error:
        raise ValueError(
            f"the engines' key cannot be kept in {path.parent} ({error.strerror}); set "
            "launch.key_directory to a directory of yours that all nodes see"
        ) from None
    with os.fdopen(file, "w") as stream:
        stream.write(secrets.token_hex(32) + "\n")
