"""The trainer's side of the `gloo` backend; does not import vLLM."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from megatron_credit.rollouts import vllm_api
from megatron_credit.rollouts.buckets import Piece, pack, plan_buckets
from megatron_credit.rollouts.client import EngineClient
from megatron_credit.rollouts.config import EngineConfig
from megatron_credit.rollouts.errors import EngineError
from megatron_credit.rollouts.gloo_group import GlooGroup

LOOPBACK = "127.0.0.1"


class GlooSender:
    """Broadcasts buckets over Gloo while the engines' control endpoints wait for them."""

    def __init__(self, clients: list[EngineClient], config: EngineConfig) -> None:
        self._clients = clients
        self._workers = config.tensor_parallel
        self._timeout_s = config.sync_timeout_s
        self._bucket_bytes = config.bucket_mib << 20
        self._group: GlooGroup | None = None
        self._pool = ThreadPoolExecutor(len(clients), thread_name_prefix="weight-sync")

    def send(
        self, pieces: Sequence[Piece], weights: Iterator[tuple[str, Tensor]], *, version: int
    ) -> None:
        """As `sync.Sender` says."""
        if self._group is None:
            self._connect()
        self._all(vllm_api.START_UPDATE, None, "weight sync, start")
        body = vllm_api.update_info(
            [piece.name for piece in pieces],
            [str(piece.dtype).removeprefix("torch.") for piece in pieces],
            [list(piece.shape) for piece in pieces],
        )
        waiting = self._begin(vllm_api.UPDATE, [body] * len(self._clients), "weight sync, transfer")
        for bucket in plan_buckets(pieces, self._bucket_bytes):
            data = pack(bucket, weights)
            self._broadcast(data, bucket, waiting)
        for _ in weights:
            raise ValueError("the weight stream brought more tensors than its metadata announced")
        collect(waiting)
        self._all(
            vllm_api.FINISH_UPDATE, {"weight_version": str(version)}, "weight sync, finish"
        )

    def close(self) -> None:
        """Leaves the group."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._group is not None:
            self._group.close()
            self._group = None

    def _connect(self) -> None:
        """Meets the engines' workers; rank 0 is ours, each engine has the next ranks."""
        world_size = 1 + self._workers * len(self._clients)
        group = GlooGroup(
            LOOPBACK, 0, rank=0, world_size=world_size, timeout_s=self._timeout_s
        )
        bodies = [
            {
                "init_info": {
                    "master_address": LOOPBACK,
                    "master_port": group.port,
                    "rank_offset": 1 + number * self._workers,
                    "world_size": world_size,
                    "bucket_bytes": self._bucket_bytes,
                    "timeout_s": self._timeout_s,
                }
            }
            for number in range(len(self._clients))
        ]
        waiting = self._begin(vllm_api.INIT_TRANSFER, bodies, "weight sync, connection")
        try:
            group.join()
        except RuntimeError as error:
            collect(waiting)
            raise EngineError(f"weight sync, connection: {self._names()}: {error}") from None
        collect(waiting)
        self._group = group

    def _broadcast(
        self, data: Tensor, bucket: Sequence[Piece], waiting: list[Future]
    ) -> None:
        """Sends one bucket; the engines' own errors say more than a broken broadcast."""
        for answer in waiting:
            if answer.done():
                answer.result()
        try:
            self._group.broadcast(data)
        except RuntimeError as error:
            self._group = None
            collect(waiting)
            raise EngineError(
                f"weight sync, transfer: {self._names()} did not take {bucket[0].name} .. "
                f"{bucket[-1].name}: {error}"
            ) from None

    def _begin(self, path: str, bodies: list, purpose: str) -> list[Future]:
        return [
            self._pool.submit(client.post, path, body, self._timeout_s, purpose)
            for client, body in zip(self._clients, bodies, strict=True)
        ]

    def _all(self, path: str, body: dict | None, purpose: str) -> None:
        collect(self._begin(path, [body] * len(self._clients), purpose))

    def _names(self) -> str:
        return ", ".join(client.address for client in self._clients)


def collect(waiting: list[Future]) -> None:
    """Waits for all answers; raises the first engine's error."""
    for answer in waiting:
        answer.result()
