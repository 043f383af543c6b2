"""What a checkpoint says of itself; light to import, so that a start can be refused early."""

import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_credit.mcore.architecture import Architecture

MANIFEST = "manifest.json"
VERSION = 1

_UNSAID = {"teacher": "none"}
"""What a checkpoint has of which its manifest says nothing."""
_FILE = re.compile(r"\.metadata|metadata\.json|__\d+_\d+\.distcp")
"""Names of the files that are written. Loaders open others too where they are (common.pt)."""
_REMAINS = re.compile(r"\.nfs\w+")
"""What NFS leaves where an open file is deleted."""
_DIGEST = re.compile(r"(\d+) bytes, crc32 [0-9a-f]{8}")
_KINDS = {"identity": dict, "num_steps": int, "layout": dict, "files": dict}


class DamagedCheckpoint(ValueError):
    """A checkpoint that is not what was written; says which file, and what is wrong with it."""


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


def unfinished(directory: Path) -> Path:
    """Where a checkpoint is written until it is complete."""
    return directory.with_name(f".{directory.name}.unfinished")


def manifest_text(content: Mapping[str, Any]) -> str:
    """The manifest file with this content (identity, num_steps, layout, files)."""
    manifest = {"version": VERSION, **content}
    return json.dumps({**manifest, "crc32": _checksum(manifest)}, indent=2) + "\n"


def read_manifest(directory: Path, expected: Mapping[str, str]) -> dict[str, Any]:
    """The manifest of a complete checkpoint with this identity; ValueError names what is wrong.

    DamagedCheckpoint where a file is missing, cut, not listed, or no manifest: the content of the
    other files is not looked at.
    """
    manifest = _parsed(directory)
    if manifest.get("version") != VERSION:
        raise ValueError(
            f"{directory / MANIFEST} has version {manifest.get('version')}; "
            f"this program reads {VERSION}"
        )
    _check_form(directory, manifest)
    try:
        _check_files(directory, manifest["files"])
    except OSError as error:
        raise DamagedCheckpoint(f"{directory} cannot be read: {error}") from None
    for name, value in expected.items():
        found = manifest["identity"].get(name, _UNSAID.get(name))
        if found != value:
            raise ValueError(
                f"checkpoint {directory} has {name}={found}, but this run has {name}={value}; "
                "resume with the configuration that wrote it"
            )
    return manifest


def _parsed(directory: Path) -> dict[str, Any]:
    """The manifest as an object of unknown content."""
    path = directory / MANIFEST
    if directory.exists() and not directory.is_dir():
        raise DamagedCheckpoint(f"{directory} is not a complete checkpoint: it is no directory")
    if not path.is_file():
        raise DamagedCheckpoint(f"{directory} is not a complete checkpoint: it has no {MANIFEST}")
    try:
        manifest = json.loads(path.read_bytes())
    # RecursionError: brackets without end.
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} is not JSON: {error}") from None
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(manifest, dict):
        raise DamagedCheckpoint(f"{path} is no manifest: it holds a {type(manifest).__name__}")
    return manifest


def _check_form(directory: Path, manifest: dict[str, Any]) -> None:
    """It has all fields, and those that it was written with."""
    path = directory / MANIFEST
    for name, kind in _KINDS.items():
        if not isinstance(manifest.get(name), kind):
            raise DamagedCheckpoint(f"{path} is no manifest: {name} is missing or of another type")
    written = {name: value for name, value in manifest.items() if name != "crc32"}
    # Those of earlier versions of this program have none.
    if "crc32" in manifest and manifest["crc32"] != _checksum(written):
        raise DamagedCheckpoint(f"{path} is not what was written: its crc32 does not fit")
    for name, digest in manifest["files"].items():
        if not _FILE.fullmatch(name):
            raise DamagedCheckpoint(f"{path} names {name!r}, which is no file of a checkpoint")
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise DamagedCheckpoint(f"{path} says of {name} {digest!r}, not its size and crc32")


def _check_files(directory: Path, files: Mapping[str, str]) -> None:
    """The files are there, of the right sizes, and no others."""
    there = {path.name for path in directory.iterdir() if not _REMAINS.fullmatch(path.name)}
    unknown = sorted(there - {*files, MANIFEST})
    if unknown:
        raise DamagedCheckpoint(
            f"checkpoint {directory} holds {', '.join(unknown)}, which its manifest does not list; "
            "it was not written there by a save: take it out"
        )
    missing = [name for name in files if not (directory / name).is_file()]
    if missing:
        raise DamagedCheckpoint(f"checkpoint {directory} lacks {', '.join(missing)}")
    for name, digest in files.items():
        size, stated = (directory / name).stat().st_size, _DIGEST.fullmatch(digest)
        assert stated is not None
        if size != int(stated[1]):
            raise DamagedCheckpoint(
                f"checkpoint {directory} is damaged: {name} has {size} bytes, not {stated[1]}"
            )


def _checksum(manifest: Mapping[str, Any]) -> str:
    """CRC-32 of the content, however it is laid out as text."""
    return f"{zlib.crc32(json.dumps(manifest, sort_keys=True).encode()):08x}"
