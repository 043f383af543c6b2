"""The trainer's side of the `gloo` backend; does not import vLLM."""

import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack
from typing import NamedTuple
from urllib.parse import urlsplit

from torch import Tensor

from megatron_credit.rollouts import vllm_api
from megatron_credit.rollouts.buckets import Piece, bucket_bytes, pack, plan_buckets
from megatron_credit.rollouts.client import EngineClient
from megatron_credit.rollouts.config import EngineConfig
from megatron_credit.rollouts.errors import EngineError
from megatron_credit.rollouts.gloo_group import GlooGroup, local_address
from megatron_credit.rollouts.participants import Answers, Participants, sync_error

DEFAULT_BUCKET_MIB = 8
CONNECT_POLL_S = 0.02
TRANSFER_POLL_S = 0.0002
ERROR_S = 10.0
"""How long an engine whose connection broke may take to say why."""
PATIENCE = 10
"""Engines wait this many times longer for us than we for them: one that hangs must not make the
others give up."""


class Joining(NamedTuple):
    """An engine that was asked to meet us."""

    group: GlooGroup
    answer: Future


class GlooSender:
    """Broadcasts buckets over Gloo while the engines' control endpoints wait for them.

    Each engine has a group of its own with us, so that one that dies breaks no other's update: an
    update that broke off leaves an engine that must be restarted. A bucket is packed once, and the
    groups' own threads send it at the same time.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._workers = config.tensor_parallel
        self._timeout_s = config.sync_timeout_s
        self._bucket_bytes = (config.bucket_mib or DEFAULT_BUCKET_MIB) << 20
        self._groups: dict[EngineClient, GlooGroup] = {}

    def send(
        self,
        engines: Participants,
        pieces: Sequence[Piece],
        weights: Iterator[tuple[str, Tensor]],
        *,
        version: int,
    ) -> None:
        """As `sync.Sender` says."""
        with ExitStack() as failed:
            failed.callback(self.close)  # an engine that waits for more must not wait in vain
            self._connect(engines)
            engines.ask(vllm_api.START_UPDATE, None, "start")
            self._transfer(engines, pieces, weights)
            engines.ask(vllm_api.FINISH_UPDATE, {"weight_version": str(version)}, "finish")
            failed.pop_all()

    def forget(self, client: EngineClient) -> None:
        """As `sync.Sender` says."""
        group = self._groups.pop(client, None)
        if group is not None:
            close_aside(group)

    def close(self) -> None:
        """As `sync.Sender` says."""
        for client in list(self._groups):
            self.forget(client)

    def _connect(self, engines: Participants) -> None:
        """Meets the workers of engines that are new to us; rank 0 is ours, theirs are the next."""
        joining = {}
        for client in list(engines.live):
            if client not in self._groups:
                try:
                    joining[client] = self._invite(client)
                except OSError as error:
                    engines.fail(client, sync_error(client, "connection", f"is away: {error}"))
        waiting = dict(joining)
        while waiting:
            for client in list(waiting):
                if self._has_joined(engines, client, waiting[client]):
                    self._groups[client] = waiting.pop(client).group
                elif client not in engines.live:
                    close_aside(waiting.pop(client).group)
            if waiting:
                time.sleep(CONNECT_POLL_S)
        engines.collect({client: one.answer for client, one in joining.items()}, "connection")

    def _invite(self, client: EngineClient) -> Joining:
        """Begins to meet an engine. OSError where it cannot be reached."""
        host = meeting_host(client.address)
        size, token = 1 + self._workers, secrets.token_hex(16)
        group = GlooGroup(host, 0, rank=0, world_size=size, timeout_s=self._timeout_s, token=token)
        info = {
            "master_address": host,
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": size,
            "token": token,
            "bucket_bytes": self._bucket_bytes,
            "timeout_s": self._timeout_s * PATIENCE,
        }
        body, purpose = {"init_info": info}, "weight sync, connection"
        answer = client.begin_post(vllm_api.INIT_TRANSFER, body, self._timeout_s, purpose)
        return Joining(group, answer)

    def _has_joined(self, engines: Participants, client: EngineClient, one: Joining) -> bool:
        """Whether the engine's group is complete; an engine that fails drops out."""
        engines.drop_failed({client: one.answer})
        if client not in engines.live:
            return False
        absent = one.group.absent()
        if absent:
            if one.answer.done():
                problem = f"never joined as ranks {absent}"
                engines.fail(client, sync_error(client, "connection", problem))
            return False
        try:
            one.group.join()
        except RuntimeError as error:
            fail_with_reason(engines, client, one.answer, ("connection", f"did not join: {error}"))
            return False
        return True

    def _transfer(
        self,
        engines: Participants,
        pieces: Sequence[Piece],
        weights: Iterator[tuple[str, Tensor]],
    ) -> None:
        """All tensors, until every engine says that it has loaded them."""
        body = vllm_api.update_info(
            [piece.name for piece in pieces],
            [str(piece.dtype).removeprefix("torch.") for piece in pieces],
            [list(piece.shape) for piece in pieces],
        )
        loading = engines.begin(
            vllm_api.UPDATE, lambda _: body, "transfer", timeout_s=self._timeout_s * PATIENCE
        )
        under_way: tuple[Sequence[Piece], Tensor] | None = None
        for bucket in plan_buckets(pieces, self._bucket_bytes):
            if not engines.live:
                break
            data = pack(bucket, weights)  # while the bucket before is on its way
            if under_way is not None:
                self._finish(engines, under_way[0], loading)
            for client in engines.live:
                self._groups[client].start_broadcast(data)
            under_way = (bucket, data)
        if under_way is not None:
            self._finish(engines, under_way[0], loading)
        for name, _ in weights:  # the other trainer ranks stream to the end, whatever happens here
            if engines.live:
                raise ValueError(f"the weight stream brought {name}, which was not announced")
        engines.collect({client: loading[client] for client in engines.live}, "transfer")

    def _finish(self, engines: Participants, bucket: Sequence[Piece], loading: Answers) -> None:
        """Waits until every engine has the bucket; the engines' own errors say more than a broken
        broadcast."""
        before = set(engines.failed)
        waiting = list(engines.live)
        while waiting:
            engines.drop_failed(loading)  # an engine that refused a tensor takes no more
            for client in [one for one in waiting if one not in engines.live]:
                waiting.remove(client)
                self.forget(client)
            for client in [one for one in waiting if self._groups[one].is_done()]:
                waiting.remove(client)
                try:
                    self._groups[client].finish_broadcast()
                except RuntimeError as error:
                    what = ("transfer", f"did not take them: {error}")
                    fail_with_reason(engines, client, loading[client], what)
                    self.forget(client)
            if waiting:
                time.sleep(TRANSFER_POLL_S)
        names = f"{bucket[0].name} .. {bucket[-1].name} ({bucket_bytes(bucket)} bytes)"
        for client in set(engines.failed) - before:
            error = engines.failed[client]
            problem = f"with {names} on their way, {error.problem}"
            engines.failed[client] = EngineError(problem, error.log)


def fail_with_reason(
    engines: Participants, client: EngineClient, answer: Future, otherwise: tuple[str, str]
) -> None:
    """The engine drops out with the error that it gives soon, or with this phase and problem."""
    try:
        error = answer.exception(ERROR_S)
    except (TimeoutError, CancelledError):
        error = None
    if not isinstance(error, EngineError):
        error = sync_error(client, *otherwise)
    engines.fail(client, error)


def close_aside(group: GlooGroup) -> None:
    """Leaves a group, which waits for what is on its way, in a thread of its own."""
    threading.Thread(target=group.close, name="leave weight group", daemon=True).start()


def meeting_host(address: str) -> str:
    """Our own address as the engine at this one reaches it; OSError where we do not reach it."""
    return local_address(urlsplit(address).hostname or "")
