"""The trainer's side of the `gloo` backend; does not import vLLM."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from urllib.parse import urlsplit

from torch import Tensor

from megatron_credit.rollouts import vllm_api
from megatron_credit.rollouts.buckets import Piece, bucket_bytes, pack, plan_buckets
from megatron_credit.rollouts.client import EngineClient, collect
from megatron_credit.rollouts.config import EngineConfig
from megatron_credit.rollouts.errors import EngineError
from megatron_credit.rollouts.gloo_group import GlooGroup, local_address

DEFAULT_BUCKET_MIB = 8
CONNECT_POLL_S = 0.02
TRANSFER_POLL_S = 0.0002


class GlooSender:
    """Broadcasts buckets over Gloo while the engines' control endpoints wait for them."""

    def __init__(self, clients: list[EngineClient], config: EngineConfig) -> None:
        self._clients = clients
        self._workers = config.tensor_parallel
        self._timeout_s = config.sync_timeout_s
        self._bucket_bytes = (config.bucket_mib or DEFAULT_BUCKET_MIB) << 20
        self._group: GlooGroup | None = None

    def send(
        self, pieces: Sequence[Piece], weights: Iterator[tuple[str, Tensor]], *, version: int
    ) -> None:
        """As `sync.Sender` says."""
        with ExitStack() as failed:
            failed.callback(self._leave)  # an engine that waits for more must not wait in vain
            if self._group is None:
                self._connect()
            self._all(vllm_api.START_UPDATE, None, "weight sync, start")
            body = vllm_api.update_info(
                [piece.name for piece in pieces],
                [str(piece.dtype).removeprefix("torch.") for piece in pieces],
                [list(piece.shape) for piece in pieces],
            )
            self._transfer(body, pieces, weights)
            self._all(
                vllm_api.FINISH_UPDATE, {"weight_version": str(version)}, "weight sync, finish"
            )
            failed.pop_all()

    def close(self) -> None:
        """Leaves the group."""
        self._leave()

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _connect(self) -> None:
        """Meets the engines' workers; rank 0 is ours, each engine has the next ranks."""
        world_size = 1 + self._workers * len(self._clients)
        host = meeting_host([client.address for client in self._clients])
        group = GlooGroup(host, 0, rank=0, world_size=world_size, timeout_s=self._timeout_s)
        bodies = [
            {
                "init_info": {
                    "master_address": host,
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
        self._group = group
        while absent := group.absent():
            raise_first_error(waiting)
            if all(answer.done() for answer in waiting):
                raise self._error("connection", f"never joined as ranks {absent}")
            time.sleep(CONNECT_POLL_S)
        try:
            group.join()
        except RuntimeError as error:
            collect(waiting)
            raise self._error("connection", f"did not join: {error}") from None
        collect(waiting)

    def _transfer(
        self, body: dict, pieces: Sequence[Piece], weights: Iterator[tuple[str, Tensor]]
    ) -> None:
        """All tensors, until every engine says that it has loaded them."""
        waiting = self._begin(vllm_api.UPDATE, [body] * len(self._clients), "weight sync, transfer")
        under_way: deque[tuple[Sequence[Piece], Tensor]] = deque()
        for bucket in plan_buckets(pieces, self._bucket_bytes):
            data = pack(bucket, weights)  # while the bucket before is on its way
            if under_way:
                self._finish(under_way[0][0], waiting)
                under_way.popleft()
            self._group.start_broadcast(data)
            under_way.append((bucket, data))
        if under_way:
            self._finish(under_way[0][0], waiting)
        for name, _ in weights:
            raise ValueError(f"the weight stream brought {name}, which was not announced")
        collect(waiting)

    def _finish(self, bucket: Sequence[Piece], waiting: list[Future]) -> None:
        """Waits for a broadcast; the engines' own errors say more than a broken broadcast."""
        try:
            while not self._group.is_done():
                raise_first_error(waiting)  # an engine that refused a tensor takes no more
                time.sleep(TRANSFER_POLL_S)
            try:
                self._group.finish_broadcast()
            except RuntimeError as error:
                collect(waiting)
                raise self._error("transfer", f"did not take them: {error}") from None
        except EngineError as error:
            names = f"{bucket[0].name} .. {bucket[-1].name}"
            raise EngineError(
                f"with {names} ({bucket_bytes(bucket)} bytes) on their way, {error.problem}",
                error.log_path,
            ) from None

    def _begin(self, path: str, bodies: list, purpose: str) -> list[Future]:
        return [
            client.begin_post(path, body, self._timeout_s, purpose)
            for client, body in zip(self._clients, bodies, strict=True)
        ]

    def _all(self, path: str, body: dict | None, purpose: str) -> None:
        collect(self._begin(path, [body] * len(self._clients), purpose))

    def _error(self, phase: str, problem: str) -> EngineError:
        names = ", ".join(client.address for client in self._clients)
        return EngineError(f"weight sync, {phase}: the engine at {names} {problem}")


def raise_first_error(waiting: list[Future]) -> None:
    """Raises the error of an engine that has failed already."""
    for answer in waiting:
        if answer.done():
            answer.result()


def meeting_host(addresses: Sequence[str]) -> str:
    """Our own address as the engines reach it: loopback when all of them run on this machine."""
    hosts = {local_address(urlsplit(address).hostname) for address in addresses}
    remote = sorted(host for host in hosts if not host.startswith("127."))
    return remote[0] if remote else "127.0.0.1"
