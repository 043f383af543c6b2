"""What a checkpoint says of itself; light to import, so that a start can be refused early."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_credit.mcore.architecture import Architecture

MANIFEST = "manifest.json"
VERSION = 1


_UNSAID = {"teacher": "none"}
"""What a checkpoint has of which its manifest says nothing."""


def identity(
    architecture: Architecture, *, dtype: str, optimizer: str, teacher: str = "none"
) -> dict[str, str]:
    """What a checkpoint must share with a run that goes on from it.

    `teacher`: "ema" where it holds a moving average of the weights beside them, else "none".
    """
    return {
        "architecture": architecture.fingerprint(),
        "dtype": dtype,
        "optimizer": optimizer,
        "teacher": teacher,
    }


def read_manifest(directory: Path, expected: Mapping[str, str]) -> dict[str, Any]:
    """The manifest of a complete checkpoint with this identity; ValueError names what is wrong."""
    path = directory / MANIFEST
    if not path.is_file():
        raise ValueError(f"{directory} is not a complete checkpoint: it has no {MANIFEST}")
    try:
        manifest = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if manifest.get("version") != VERSION:
        raise ValueError(
            f"{path} has version {manifest.get('version')}; this program reads {VERSION}"
        )
    for name, value in expected.items():
        found = manifest["identity"].get(name, _UNSAID.get(name))
        if found != value:
            raise ValueError(
                f"checkpoint {directory} has {name}={found}, but this run has {name}={value}; "
                "resume with the configuration that wrote it"
            )
    missing = [name for name in manifest["files"] if not (directory / name).is_file()]
    if missing:
        raise ValueError(f"checkpoint {directory} lacks {', '.join(missing)}")
    return manifest
