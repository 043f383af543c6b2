"""How ranks split a full megatron tensor, by its name. Pure tensor arithmetic.

The tensor ranks split all parameters but those of experts, which the expert tensor ranks split:
see `Ranks.splitting`.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_SPLITS = {
    "word_embeddings.weight": 0,
    "output_layer.weight": 0,
    "linear_qkv.weight": 0,
    "linear_qkv.bias": 0,
    "linear_proj.weight": 1,
    "linear_fc1.weight": 0,
    "linear_fc2.weight": 1,
}


def is_experts(name: str) -> bool:
    """Whether the megatron parameter `name` is one of an expert."""
    return ".experts." in name


def split_dimension(name: str) -> int | None:
    """The dimension of megatron parameter `name` that is split; None: all ranks hold a copy."""
    for suffix, dimension in _SPLITS.items():
        if name.endswith(suffix):
            return dimension
    return None


def local_shape(full: Sequence[int], name: str, size: int) -> tuple[int, ...]:
    """Shape of one of `size` ranks' parts of a tensor of shape `full`."""
    shape = list(full)
    dimension = split_dimension(name)
    if dimension is not None:
        shape[dimension] //= size
    return tuple(shape)


def full_shape(local: Sequence[int], name: str, size: int) -> tuple[int, ...]:
    """Shape of the tensor of which each of `size` ranks holds a part of shape `local`."""
    shape = list(local)
    dimension = split_dimension(name)
    if dimension is not None:
        shape[dimension] *= size
    return tuple(shape)


def take_shard(full: Tensor, name: str, rank: int, size: int) -> Tensor:
    """The part of `full` that rank `rank` of `size` holds."""
    dimension = split_dimension(name)
    if dimension is None or size == 1:
        return full
    if _is_gated(name):
        # Each rank holds its part of the gate above its part of the up projection.
        return torch.cat([half.chunk(size)[rank] for half in full.chunk(2)])
    return full.chunk(size, dimension)[rank]


def join_shards(shards: Sequence[Tensor], name: str) -> Tensor:
    """The full tensor of all ranks' parts, in rank order; inverse of `take_shard`."""
    dimension = split_dimension(name)
    if dimension is None or len(shards) == 1:
        return shards[0]
    if _is_gated(name):
        gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
        return torch.cat([*gates, *ups])
    return torch.cat(list(shards), dimension)


def pad_rows(tensor: Tensor, num_rows: int) -> Tensor:
    """`tensor` with zero rows appended up to `num_rows`."""
    return F.pad(tensor, (0, 0, 0, num_rows - tensor.shape[0]))


def _is_gated(name: str) -> bool:
    return name.endswith("linear_fc1.weight")
