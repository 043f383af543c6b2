"""Looks into a checkpoint's pickles before anything unpickles them freely.

torch's distributed checkpoints keep an index, and a few small objects, as pickles that the loader
opens without restriction; one with foreign code would run it. Tensors are loaded safely as it is.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from megatron_credit.mcore.manifest import DamagedCheckpoint

INDEX = ".metadata"
_ALLOWED = {
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}
_UNREADABLE = (
    pickle.UnpicklingError,
    # What pickle raises for bytes that are none, beside errors of its own.
    *(EOFError, AttributeError, ImportError, LookupError, TypeError, ValueError),
    *(MemoryError, OverflowError, RecursionError, OSError, RuntimeError),
)


class _IndexUnpickler(pickle.Unpickler):
    """Knows the classes of an index and the types of tensors, nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if not is_dtype and (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}")
        return super().find_class(module, name)


def check_pickles(directory: Path) -> None:
    """Returns if every pickle of the checkpoint holds plain data; DamagedCheckpoint names the one
    that does not, without having run anything of it."""
    path = directory / INDEX
    try:
        with path.open("rb") as stream:
            index = _IndexUnpickler(stream).load()
        if not isinstance(index, Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(index).__name__}")
        objects = _objects(index)
    except _UNREADABLE as error:
        raise DamagedCheckpoint(f"{path} is not a checkpoint's index: {error}") from error
    for name, place in objects:
        path = directory / place.relative_path
        try:
            # Both are parts of the index, which may say anything.
            if path.parent != directory:
                raise pickle.UnpicklingError("it lies outside of the checkpoint")
            if place.transform_descriptors:
                raise pickle.UnpicklingError("it is packed, which no save does")
            with path.open("rb") as stream:
                stream.seek(place.offset)
                content = stream.read(place.length)
            torch.load(io.BytesIO(content), weights_only=True)
        except _UNREADABLE as error:
            raise DamagedCheckpoint(f"{path}: {name} does not hold plain data: {error}") from error


def _objects(index: Metadata) -> list[tuple[str, Any]]:
    """(name, place in a file) of everything in the checkpoint that is no tensor."""
    return [
        (place.fqn, storage)
        for place, storage in index.storage_data.items()
        if isinstance(index.state_dict_metadata[place.fqn], BytesStorageMetadata)
    ]
