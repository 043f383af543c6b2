"""The trainer's side of the `nccl` backend: vLLM's own trainer engine. GPUs only."""

import socket
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from vllm.distributed.weight_transfer import (
    ParamMeta,
    WeightSource,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from megatron_credit.rollouts import vllm_api
from megatron_credit.rollouts.buckets import Piece
from megatron_credit.rollouts.client import EngineClient
from megatron_credit.rollouts.config import EngineConfig

DEFAULT_BUCKET_MIB = 512


class OnePass(WeightSource):
    """The weights of the sync in progress, as vLLM asks for them."""

    pieces: Sequence[Piece] = ()
    weights: Iterator[tuple[str, Tensor]] = iter(())

    def metadata(self) -> list[ParamMeta]:
        """What the pass will bring."""
        return [ParamMeta(piece.name, piece.dtype, piece.shape) for piece in self.pieces]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.weights


class Control:
    """vLLM's four control calls, for one engine."""

    def __init__(self, client: EngineClient, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Joins the group."""
        self._post(vllm_api.INIT_TRANSFER, {"init_info": init_info}, "connection")

    def start_weight_update(self) -> None:
        """Makes the layers ready to be loaded again."""
        self._post(vllm_api.START_UPDATE, None, "start")

    def update_weights(self, update_info: Any) -> None:
        """Receives the announced tensors."""
        self._post(vllm_api.UPDATE, {"update_info": update_info}, "transfer")

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Packs the layers for computing again."""
        self._post(vllm_api.FINISH_UPDATE, {"weight_version": weight_version}, "finish")

    def _post(self, path: str, body: Any, phase: str) -> None:
        self._client.post(path, body, self._timeout_s, f"weight sync, {phase}")


class NcclSender:
    """Sends to one engine; the version is set after the transfer."""

    def __init__(self, clients: list[EngineClient], config: EngineConfig) -> None:
        if len(clients) != 1:
            raise ValueError(f"the nccl backend serves one engine, got {len(clients)}")
        self._client = clients[0]
        self._config = config
        self._source = OnePass()
        self._engine = None

    def send(
        self, pieces: Sequence[Piece], weights: Iterator[tuple[str, Tensor]], *, version: int
    ) -> None:
        """As `sync.Sender` says."""
        self._source.pieces, self._source.weights = pieces, weights
        if self._engine is None:
            self._engine = self._connect()
        self._engine.send_weights()
        self._client.post(
            vllm_api.SET_VERSION,
            {"new_version": str(version)},
            self._config.sync_timeout_s,
            "weight sync, version",
        )

    def close(self) -> None:
        """Leaves the group."""
        self._engine = None

    def _connect(self) -> Any:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        info = NCCLTrainerInitInfo(
            "127.0.0.1",
            port,
            1 + self._config.tensor_parallel,
            packed_buffer_size_bytes=(self._config.bucket_mib or DEFAULT_BUCKET_MIB) << 20,
            rank=0,
        )
        control = Control(self._client, self._config.sync_timeout_s)
        return WeightTransferTrainerFactory.trainer_init(info, client=control, source=self._source)
