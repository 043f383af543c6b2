"""The trainer's side of the `nccl` backend: vLLM's own trainer engine. GPUs only."""

import base64
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
from vllm.distributed.weight_transfer import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

from megatron_credit.rollouts import vllm_api
from megatron_credit.rollouts.buckets import Piece
from megatron_credit.rollouts.client import EngineClient
from megatron_credit.rollouts.config import EngineConfig
from megatron_credit.rollouts.errors import EngineError
from megatron_credit.rollouts.participants import Answers, Participants, sync_error

DEFAULT_BUCKET_MIB = 512
JOIN_POLL_S = 0.05


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
    """vLLM's control calls, fanned out to all engines of the sync."""

    def __init__(self) -> None:
        self.engines = Participants([], timeout_s=0.0)
        self.members: Sequence[EngineClient] = ()
        """The engines of the group, none of which may fail."""
        self.version = 0
        self.on_failure: Callable[[], None] = lambda: None
        """Called when an engine failed that others wait for."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Not asked: `NcclSender` brings the engines together itself."""
        raise NotImplementedError

    def start_weight_update(self) -> None:
        """Makes the layers ready to be loaded again."""
        self._ask(vllm_api.START_UPDATE, None, "start")

    def update_weights(self, update_info: Any) -> None:
        """Receives the announced tensors."""
        body = {"update_info": update_info}
        loading = self.engines.begin(vllm_api.UPDATE, lambda _: body, "transfer")
        while not all(answer.done() for answer in loading.values()):
            self._require_all(loading)
            time.sleep(JOIN_POLL_S)
        self._require_all(loading)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Packs the layers for computing again; the version is the sync's."""
        version = str(self.version) if weight_version is None else weight_version
        self._ask(vllm_api.FINISH_UPDATE, {"weight_version": version}, "finish")

    def _ask(self, path: str, body: Any, phase: str) -> None:
        self.engines.ask(path, body, phase)
        self._require_all({})

    def _require_all(self, answers: Answers) -> None:
        """EngineError, after the broadcast was freed of waiting, where an engine has failed."""
        self.engines.drop_failed(answers)
        try:
            require_whole(self.engines, self.members)
        except EngineError:
            self.on_failure()
            raise


class NcclSender:
    """One group of all engines, in which a broadcast reaches them along NCCL's own trees.

    An engine that fails in the middle breaks the group, and NCCL leaves no way to end the update of
    the others: they fail with it, and must be started again.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._workers = config.tensor_parallel
        self._buffer_bytes = (config.bucket_mib or DEFAULT_BUCKET_MIB) << 20
        self._members: tuple[EngineClient, ...] = ()
        self._source = OnePass()
        self._control = Control()
        self._engine: NCCLTrainerWeightTransferEngine | None = None

    def send(
        self,
        engines: Participants,
        pieces: Sequence[Piece],
        weights: Iterator[tuple[str, Tensor]],
        *,
        version: int,
    ) -> None:
        """As `sync.Sender` says."""
        self._control.engines, self._control.version = engines, version
        self._source.pieces, self._source.weights = pieces, weights
        if tuple(engines.live) != self._members:
            self.close()
            # An earlier group would keep its buffers on the engines' GPUs.
            engines.ask(vllm_api.LEAVE_TRANSFER, None, "leaving an earlier group")
        if engines.live:
            # What an engine does wrong arrives as EngineError, what NCCL makes of it as another.
            try:
                if self._engine is None:
                    self._connect(engines)
                assert self._engine is not None
                self._engine.send_weights()
            except RuntimeError as error:
                self.close()
                for client in list(engines.live):
                    problem = f"lost its weight group: {error}"
                    engines.fail(client, sync_error(client, "transfer", problem))
        for _ in weights:  # the other trainer ranks stream to the end, whatever happens here
            pass

    def forget(self, client: EngineClient) -> None:
        """As `sync.Sender` says."""
        if client in self._members:
            self.close()

    def close(self) -> None:
        """As `sync.Sender` says."""
        self._members = ()
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None

    def _connect(self, engines: Participants) -> None:
        """Meets all workers; rank 0 is ours, each engine has the next ranks.

        The group's id travels with the authorised request: vLLM's other way, a store on a port,
        hands it out as a pickle to whoever asks.
        """
        clients = tuple(engines.live)
        self._control.members = clients
        size = 1 + self._workers * len(clients)
        group_id = new_group_id()
        wire = {"packed": True, "packed_buffer_size_bytes": self._buffer_bytes}
        bodies = {
            client: {
                "init_info": wire
                | {
                    "rank_offset": 1 + number * self._workers,
                    "world_size": size,
                    "nccl_unique_id_b64": base64.b64encode(group_id).decode(),
                }
            }
            for number, client in enumerate(clients)
        }
        joining = engines.begin(vllm_api.INIT_TRANSFER, bodies.__getitem__, "connection")
        self._engine = NCCLTrainerWeightTransferEngine(
            client=self._control, source=self._source, **wire
        )
        self._engine.model_update_group = self._join(engines, joining, group_id, size)
        engines.collect(joining, "connection")
        require_whole(engines, clients)
        self._members = clients
        self._control.on_failure = self._engine.shutdown

    def _join(
        self, engines: Participants, joining: Answers, group_id: bytes, size: int
    ) -> PyNcclCommunicator:
        """Our end of the group. EngineError where an engine fails: joining, which nothing can
        interrupt, is then left to its thread."""
        joined: Future[PyNcclCommunicator] = Future()
        device = torch.cuda.current_device() if torch.cuda.is_available() else 0

        def join() -> None:
            try:
                joined.set_result(join_group(group_id, size, device))
            except RuntimeError as error:
                joined.set_exception(error)

        threading.Thread(target=join, name="join weight group", daemon=True).start()
        while not joined.done():
            engines.drop_failed(joining)
            require_whole(engines, tuple(joining))
            time.sleep(JOIN_POLL_S)
        return joined.result()


def require_whole(engines: Participants, members: Sequence[EngineClient]) -> None:
    """EngineError where one of the members has failed."""
    for client in members:
        if client in engines.failed:
            error = engines.failed[client]
            raise EngineError(error.problem, error.log)


def new_group_id() -> bytes:
    """An id that ranks find each other by."""
    return bytes(NCCLLibrary().ncclGetUniqueId().internal)


def join_group(group_id: bytes, size: int, device: int) -> PyNcclCommunicator:
    """Rank 0 of the group, on this CUDA device."""
    if torch.cuda.is_available():
        torch.cuda.set_device(device)
    return uid_init_process_group(group_id, 0, size, device)
