"""Sends the policy's weights to the engines, each time as a new, counted version."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_credit.rollouts import vllm_api
from megatron_credit.rollouts.buckets import Piece
from megatron_credit.rollouts.client import EngineClient, collect
from megatron_credit.rollouts.config import EngineConfig
from megatron_credit.rollouts.errors import EngineError
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
        self._timeout_s = config.sync_timeout_s
        self._sender = make_sender(clients, config)

    def send(
        self,
        metadata: Sequence[TensorMeta],
        weights: Iterator[tuple[str, Tensor]],
        *,
        version: int,
    ) -> int:
        """Broadcasts the weights and resets the prefix caches; the bytes that were sent.

        Requests that run stand still meanwhile and go on with the new weights: an engine that
        computes with half of them dies. Connects on the first call. Raises EngineError that names
        the engine, and what it was doing when it died, hung or refused.
        """
        pieces = [Piece(meta.name, meta.dtype, tuple(meta.shape)) for meta in metadata]
        self._all(vllm_api.PAUSE, "pause")
        self._sender.send(pieces, weights, version=version)
        # Cached keys and values come from the old weights.
        for client, answer in zip(
            self._clients, self._all(vllm_api.RESET_CACHE_OF_ALL, "prefix cache reset"), strict=True
        ):
            if not vllm_api.cache_was_reset(answer):
                raise EngineError(
                    f"weight sync, prefix cache reset: the engine at {client.address} kept keys "
                    "and values of the old weights"
                )
        self._all(vllm_api.RESUME, "resumption")
        return sum(piece.num_bytes for piece in pieces)

    def _all(self, path: str, phase: str) -> list[Any]:
        """The answers of all engines, which are asked together."""
        answers = [
            client.begin_post(path, None, self._timeout_s, f"weight sync, {phase}")
            for client in self._clients
        ]
        collect(answers)
        return [answer.result() for answer in answers]

    def close(self) -> None:
        """Leaves the group."""
        self._sender.close()


def make_sender(clients: list[EngineClient], config: EngineConfig) -> Sender:
    """The sender of the configured backend."""
    if weight_backend(config) == "gloo":
        return GlooSender(clients, config)
    from megatron_credit.rollouts.nccl_sender import NcclSender

    return NcclSender(clients, config)
