"""Sends the policy's weights to the engines, each time as a new, counted version."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatron_credit.rollouts.buckets import Piece
from megatron_credit.rollouts.client import EngineClient
from megatron_credit.rollouts.config import EngineConfig
from megatron_credit.rollouts.gloo_sender import GlooSender
from megatron_credit.rollouts.server import weight_backend


class TensorMeta(Protocol):
    """What is known of a tensor before it is sent."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Sender(Protocol):
    """Moves tensors; one implementation a backend."""

    def send(
        self, pieces: Sequence[Piece], weights: Iterator[tuple[str, Tensor]], *, version: int
    ) -> None:
        """The engines run exactly these weights, under this version, when this returns."""
        ...

    def close(self) -> None:
        """Leaves the group."""
        ...


class WeightSync:
    """The weight side of all engines, driven by one trainer rank."""

    def __init__(self, clients: list[EngineClient], config: EngineConfig) -> None:
        self._clients = clients
        self._sender = make_sender(clients, config)

    def send(
        self,
        metadata: Sequence[TensorMeta],
        weights: Iterator[tuple[str, Tensor]],
        *,
        version: int,
    ) -> int:
        """Broadcasts the weights and resets the prefix caches; the bytes that were sent.

        Connects on the first call. Raises EngineError that names the engine, and what it was doing
        when it died, hung or refused.
        """
        pieces = [Piece(meta.name, meta.dtype, tuple(meta.shape)) for meta in metadata]
        self._sender.send(pieces, weights, version=version)
        for client in self._clients:
            # Cached keys and values come from the old weights.
            client.reset_prefix_cache()
        return sum(piece.num_bytes for piece in pieces)

    def close(self) -> None:
        """Leaves the group."""
        self._sender.close()


def make_sender(clients: list[EngineClient], config: EngineConfig) -> Sender:
    """The sender of the configured backend."""
    if weight_backend(config) == "gloo":
        return GlooSender(clients, config)
    from megatron_credit.rollouts.nccl_sender import NcclSender

    return NcclSender(clients, config)
