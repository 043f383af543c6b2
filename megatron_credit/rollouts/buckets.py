"""How tensors are cut into buckets; sender and receivers follow the same rule."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """A tensor of a bucket: its name, type and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def plan_buckets(pieces: Iterable[Piece], bucket_bytes: int) -> Iterator[list[Piece]]:
    """Consecutive pieces, as many as fit; a larger one gets a bucket of its own."""
    bucket: list[Piece] = []
    size = 0
    for piece in pieces:
        if bucket and size + piece.num_bytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(piece)
        size += piece.num_bytes
    if bucket:
        yield bucket


def pack(bucket: Sequence[Piece], tensors: Iterator[tuple[str, Tensor]]) -> Tensor:
    """The bytes of the bucket's tensors end to end, taken from the stream.

    ValueError where the stream does not bring what was announced: the other side would read nonsense.
    """
    data = torch.empty(sum(piece.num_bytes for piece in bucket), dtype=torch.uint8)
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
        offset += piece.num_bytes
    return data


def unpack(bucket: Sequence[Piece], data: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The bucket's tensors as views of its bytes."""
    offset = 0
    for piece in bucket:
        place = data[offset : offset + piece.num_bytes]
        yield piece.name, place.view(piece.dtype).view(piece.shape)
        offset += piece.num_bytes
