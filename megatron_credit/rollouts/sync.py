"""Sends the policy's weights to the engines, each time as a new, counted version."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatron_credit.rollouts import vllm_api
from megatron_credit.rollouts.buckets import Piece
from megatron_credit.rollouts.client import EngineClient
from megatron_credit.rollouts.config import EngineConfig
from megatron_credit.rollouts.errors import EngineError
from megatron_credit.rollouts.gloo_sender import GlooSender
from megatron_credit.rollouts.participants import Participants, sync_error
from megatron_credit.rollouts.server import weight_backend


class TensorMeta(Protocol):
    """What is known of a tensor before it is sent."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Sender(Protocol):
    """Moves tensors; one implementation a backend."""

    def send(
        self,
        engines: Participants,
        pieces: Sequence[Piece],
        weights: Iterator[tuple[str, Tensor]],
        *,
        version: int,
    ) -> None:
        """The engines that still take part run exactly these weights, under this version, when this
        returns; where none does, the stream has been read to its end all the same."""
        ...

    def forget(self, client: EngineClient) -> None:
        """The engine is gone; without waiting for it."""
        ...

    def close(self) -> None:
        """Leaves all groups."""
        ...


class WeightSync:
    """The weight side of the engines, driven by one trainer rank."""

    def __init__(self, config: EngineConfig) -> None:
        self._timeout_s = config.sync_timeout_s
        self._sender = make_sender(config)

    def send(
        self,
        clients: Sequence[EngineClient],
        metadata: Sequence[TensorMeta],
        weights: Iterator[tuple[str, Tensor]],
        *,
        version: int,
    ) -> dict[EngineClient, EngineError]:
        """Brings the weights to these engines and resets their prefix caches; those that failed,
        and how: what they did when they died, hung or refused.

        Requests that run stand still meanwhile and go on with the new weights: an engine that
        computes with half of them dies. Connects where needed. The stream is read to its end.
        """
        engines = Participants(clients, timeout_s=self._timeout_s)
        engines.ask(vllm_api.PAUSE, None, "pause")
        self._sender.send(engines, as_pieces(metadata), weights, version=version)
        # Cached keys and values come from the old weights.
        phase = "prefix cache reset"
        for client, answer in engines.ask(vllm_api.RESET_CACHE_OF_ALL, None, phase).items():
            if not vllm_api.cache_was_reset(answer):
                problem = "kept keys and values of the old weights"
                engines.fail(client, sync_error(client, phase, problem))
        engines.ask(vllm_api.RESUME, None, "resumption")
        for client in engines.failed:
            self._sender.forget(client)
        return engines.failed

    def forget(self, client: EngineClient) -> None:
        """The engine is gone."""
        self._sender.forget(client)

    def close(self) -> None:
        """Leaves all groups."""
        self._sender.close()


def as_pieces(metadata: Sequence[TensorMeta]) -> list[Piece]:
    """The tensors as buckets count them."""
    return [Piece(meta.name, meta.dtype, tuple(meta.shape)) for meta in metadata]


def make_sender(config: EngineConfig) -> Sender:
    """The sender of the configured backend."""
    if weight_backend(config) == "gloo":
        return GlooSender(config)
    from megatron_credit.rollouts.nccl_sender import NcclSender

    return NcclSender(config)
