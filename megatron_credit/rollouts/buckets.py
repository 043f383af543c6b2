"""How tensors are cut into buckets; sender and receivers follow the same rule."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 16


@dataclass(frozen=True)
class Piece:
    """A tensor of a bucket: its name, type and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its numbers."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def room(self) -> int:
        """Bytes that it takes in a bucket, so that the next one is aligned for any type."""
        return self.num_bytes + -self.num_bytes % ALIGNMENT


def plan_buckets(pieces: Iterable[Piece], limit: int) -> Iterator[list[Piece]]:
    """Consecutive pieces, as many as fit into `limit` bytes; a larger one gets its own bucket."""
    bucket: list[Piece] = []
    size = 0
    for piece in pieces:
        if bucket and size + piece.room > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append(piece)
        size += piece.room
    if bucket:
        yield bucket


def bucket_bytes(bucket: Sequence[Piece]) -> int:
    """Bytes of a bucket as it is sent."""
    return sum(piece.room for piece in bucket)


def pack(bucket: Sequence[Piece], tensors: Iterator[tuple[str, Tensor]]) -> Tensor:
    """The bytes of the bucket's tensors end to end, taken from the stream.

    ValueError where the stream does not bring what was announced: receivers would read nonsense.
    """
    data = torch.empty(bucket_bytes(bucket), dtype=torch.uint8)
    offset = 0
    for piece in bucket:
        name, tensor = next(tensors, ("the end", torch.empty(0)))
        if (name, tensor.dtype, tuple(tensor.shape)) != (piece.name, piece.dtype, piece.shape):
            raise ValueError(
                f"weight stream brought {name} {tensor.dtype} {tuple(tensor.shape)}, announced was "
                f"{piece.name} {piece.dtype} {piece.shape}"
            )
        place = data[offset : offset + piece.num_bytes]
        place.view(piece.dtype).view(piece.shape).copy_(tensor.detach())
        offset += piece.room
    return data


def unpack(bucket: Sequence[Piece], data: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The bucket's tensors as views of its bytes."""
    offset = 0
    for piece in bucket:
        place = data[offset : offset + piece.num_bytes]
        yield piece.name, place.view(piece.dtype).view(piece.shape)
        offset += piece.room
