"""Copies of a checkpoint with one thing wrong; light to import."""

import io
import json
import pickle
import shutil
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from megatron_credit.mcore.manifest import MANIFEST, manifest_text
from megatron_credit.mcore.vetting import INDEX

DAMAGES = {
    "missing_file": "lacks __0_0.distcp",
    "truncated": "is damaged: __0_0.distcp has ",
    "flipped": "is damaged: __0_0.distcp (",
    "flipped_index": "is damaged: .metadata (",
    "no_manifest": "is not a complete checkpoint: it has no manifest.json",
    "cut_manifest": "manifest.json is not JSON",
    "garbage_manifest": "manifest.json is not JSON",
    "other_json": "manifest.json is no manifest: it holds a list",
    "empty_object": "manifest.json is no manifest: identity is missing",
    "edited_manifest": "manifest.json is not what was written: its crc32 does not fit",
    "directory_for_file": "lacks __0_0.distcp",
    "empty": "is not a complete checkpoint: it has no manifest.json",
    "file": "is not a complete checkpoint: it is no directory",
    "planted_file": "holds common.pt, which its manifest does not list",
    "listed_file": "manifest.json names 'common.pt', which is no file of a checkpoint",
    "outside": "manifest.json names '../",
    "index_bomb": ".metadata is not a checkpoint's index: it refers to io.open",
    "index_of_nothing": ".metadata is not a checkpoint's index: it holds a dict",
    "index_garbage": ".metadata is not a checkpoint's index",
    "object_bomb": "__0_0.distcp: common_state/shard_0_1 does not hold plain data",
    "object_outside": "does not hold plain data: it lies outside of the checkpoint",
}
"""What each kind of damage is called in the error."""
BOMBS = [name for name in DAMAGES if name.endswith("bomb")]


class Bomb:
    """Unpickling it would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Callable, tuple[str, str]]:
        return (open, (self.path, "w"))


def exploded(checkpoint: Path) -> Path:
    """What the bombs in a damaged checkpoint would create."""
    return checkpoint.with_name(f"{checkpoint.name}-exploded")


def damage(checkpoint: Path, kind: str) -> None:
    """Does to the checkpoint what `kind` says."""
    data, path = checkpoint / "__0_0.distcp", checkpoint / MANIFEST
    if kind.startswith(("index_", "object_", "listed", "outside")):
        sign_falsely(checkpoint, kind)
    elif kind in ("missing_file", "directory_for_file"):
        data.unlink()
        if kind == "directory_for_file":
            data.mkdir()
    elif kind == "truncated":
        data.write_bytes(data.read_bytes()[:-1])
    elif kind == "planted_file":
        (checkpoint / "common.pt").write_bytes(pickle.dumps(Bomb(exploded(checkpoint))))
    elif kind in ("empty", "file"):
        shutil.rmtree(checkpoint)
        checkpoint.mkdir() if kind == "empty" else checkpoint.write_text("")
    elif kind.startswith("flipped"):
        place = data if kind == "flipped" else checkpoint / INDEX
        content = bytearray(place.read_bytes())
        content[len(content) // 2] ^= 1
        place.write_bytes(content)
    else:
        text = path.read_text()
        manifests = {
            "cut_manifest": text[: len(text) // 2].encode(),
            "garbage_manifest": b"\xff\xfe\x00garbage",
            "other_json": b"[]",
            "empty_object": b'{"version": 1}',
            "edited_manifest": text.replace('"num_steps": ', '"num_steps": 1').encode(),
        }
        path.unlink() if kind == "no_manifest" else path.write_bytes(manifests[kind])


def sign_falsely(checkpoint: Path, kind: str) -> None:
    """A change by someone who also makes the manifest fit."""
    index, bomb = checkpoint / INDEX, Bomb(exploded(checkpoint))
    names: dict[str, Path] = {}
    if kind == "index_bomb":
        index.write_bytes(pickle.dumps(bomb))
    elif kind == "index_of_nothing":
        index.write_bytes(pickle.dumps({}))
    elif kind == "index_garbage":
        index.write_bytes(b"\x80\x04\x95garbage" * 9)
    elif kind.startswith("object_"):
        put_object(checkpoint, bomb, outside=kind == "object_outside")
    else:
        planted = checkpoint / "common.pt"
        planted.write_bytes(pickle.dumps(bomb))
        name = planted.name if kind == "listed_file" else f"../{checkpoint.name}/{planted.name}"
        names[name] = planted
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    names |= {name: checkpoint / name for name in manifest["files"]}
    manifest["files"] = {name: digest(path.read_bytes()) for name, path in names.items()}
    manifest.pop("crc32")
    manifest.pop("version")
    (checkpoint / MANIFEST).write_text(manifest_text(manifest))


def put_object(checkpoint: Path, value: object, *, outside: bool) -> None:
    """The index leads to this object in place of the one that is loaded first."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    index = pickle.loads((checkpoint / INDEX).read_bytes())
    key = next(key for key in index.storage_data if key.fqn.startswith("common_state/shard_0_1"))
    place = index.storage_data[key]
    path = checkpoint / "__0_0.distcp"
    content = path.read_bytes()
    path.write_bytes(content + buffer.getvalue())
    index.storage_data[key] = replace(
        place,
        relative_path=f"../{checkpoint.name}/{path.name}" if outside else path.name,
        offset=len(content),
        length=len(buffer.getvalue()),
    )
    (checkpoint / INDEX).write_bytes(pickle.dumps(index))


def digest(content: bytes) -> str:
    """As a manifest says it."""
    return f"{len(content)} bytes, crc32 {zlib.crc32(content):08x}"
