"""All engines of a run, in place of one: they come and go, the fleet stays."""

import logging
import threading
import time
from collections.abc import Iterator, Sequence

from torch import Tensor

from megatron_credit.batch.rollout import Completion
from megatron_credit.rollouts.client import EngineClient, GenerateRequest
from megatron_credit.rollouts.config import EngineConfig
from megatron_credit.rollouts.errors import EngineError
from megatron_credit.rollouts.members import Member
from megatron_credit.rollouts.registry import EngineSource, Entry
from megatron_credit.rollouts.spread import Spread
from megatron_credit.rollouts.sync import TensorMeta, WeightSync, as_pieces

log = logging.getLogger(__name__)
POLL_S = 1.0
"""How often the source is asked who is there."""
READY_POLL_S = 0.2


class Fleet:
    """The engines that a source names. One thread may generate while another sends weights.

    An engine is used from when it answers and has got the current weights until it dies, hangs,
    leaves, or answers with other weights than it was given.
    """

    def __init__(
        self, source: EngineSource, config: EngineConfig, *, api_key: str | None = None
    ) -> None:
        self.config = config
        self.num_lost = 0
        """Engines that were lost so far."""
        self.num_reissued = 0
        """Requests that were asked again, of another engine, so far."""
        self.last_loss: EngineError | None = None
        self.is_stopped = False
        self._source = source
        self._api_key = api_key
        self._sync = WeightSync(config)
        self._version: int | None = None
        self._members: dict[str, Member] = {}
        self._given_up: set[Entry] = set()
        self._to_forget: list[EngineClient] = []
        """Lost, and still known to the weight sync, which one thread at a time may use."""
        self._next_poll = 0.0
        self._lock = threading.RLock()

    @property
    def can_replace(self) -> bool:
        """Whether an engine may yet come in place of one that is lost."""
        return self._source.can_replace

    def wait_ready(self, timeout_s: float) -> None:
        """Returns when an engine serves; EngineError when none does within the timeout, or when
        something else answers at the only address."""
        deadline = time.monotonic() + timeout_s
        while not self._ready():
            with self._lock:
                members = list(self._members.values())
            refusals = [member.refusal for member in members if member.refusal is not None]
            if refusals and not self.can_replace:
                raise refusals[0]
            if time.monotonic() > deadline:
                raise self._none_started(members, timeout_s)
            time.sleep(READY_POLL_S)
            self._next_poll = 0.0

    def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        """For each request its samples, in order, each from an engine with the current weights.

        Requests of an engine that is lost are asked again of another; one with which several
        engines in a row were lost raises EngineError, as does the loss of the last engine when none
        comes in its place within the start-up timeout. RequestRefused for one that is wrong.
        """
        return Spread(self, requests).run()

    def send(
        self,
        metadata: Sequence[TensorMeta],
        weights: Iterator[tuple[str, Tensor]],
        version: int,
    ) -> int:
        """Gives all engines that serve these weights under this version; the bytes of a copy.

        Engines that fail are lost. EngineError when none is left and none can come; where one can,
        it gets the weights when it is there.
        """
        self._version = version
        return self._send(self._ready(), metadata, weights)

    def send_to_newcomers(
        self, metadata: Sequence[TensorMeta], weights: Iterator[tuple[str, Tensor]]
    ) -> int:
        """Gives the engines that serve without the current weights those, under their version."""
        return self._send(self.newcomers(), metadata, weights)

    def newcomers(self) -> list[Member]:
        """The engines that serve and do not have the current weights; empty before there are any
        weights."""
        if self._version is None:
            return []
        return [member for member in self._ready() if member.version != self._version]

    def current(self) -> list[Member]:
        """The engines that serve the current weights; before there are any, all that serve."""
        return [member for member in self._ready() if member.version == self._version]

    def weight_version(self) -> int | None:
        """The number of the weights that were sent last; None before the first."""
        return self._version

    def lose(self, member: Member, error: EngineError) -> None:
        """The engine is used no more, and its node is asked to start another."""
        with self._lock:
            if member.loss is not None:
                return
            member.loss = self.last_loss = error
            self._members.pop(member.entry.name, None)
            self._given_up.add(member.entry)
            self._to_forget.append(member.client)
            self.num_lost += 1
        log.warning("the engine %s is lost: %s", member, error)
        self._source.condemn(member.entry, error.problem)
        member.client.abandon()

    def stop(self) -> None:
        """Makes `generate` end in the other thread, with an EngineError."""
        self.is_stopped = True

    def close(self) -> None:
        """Leaves the engines."""
        self._sync.close()
        with self._lock:
            for member in self._members.values():
                member.client.close()
            self._members.clear()

    def _send(
        self,
        members: Sequence[Member],
        metadata: Sequence[TensorMeta],
        weights: Iterator[tuple[str, Tensor]],
    ) -> int:
        version = self._version
        assert version is not None
        while self._to_forget:
            self._sync.forget(self._to_forget.pop())
        clients = [member.client for member in members]
        failed = self._sync.send(clients, metadata, weights, version=version)
        for member in members:
            if member.client in failed:
                self.lose(member, failed[member.client])
            else:
                member.version = version
        if not self.current() and not self.can_replace:
            raise self.last_loss or EngineError("weight sync: no engine is left")
        return sum(piece.num_bytes for piece in as_pieces(metadata))

    def _ready(self) -> list[Member]:
        """The engines that serve, by what the source said lately."""
        with self._lock:
            if time.monotonic() >= self._next_poll:
                self._next_poll = time.monotonic() + POLL_S
                self._refresh()
            return [member for member in self._members.values() if member.is_ready]

    def _refresh(self) -> None:
        entries = {entry.name: entry for entry in self._source.entries()}
        for name, member in list(self._members.items()):
            if entries.get(name) != member.entry:
                self._forget(member)
        for name, entry in entries.items():
            if name not in self._members and entry not in self._given_up:
                self._members[name] = Member(entry, self._client(entry))
        for member in self._members.values():
            member.check()

    def _forget(self, member: Member) -> None:
        """Of an engine whose node says that it ended."""
        problem = f"generation: the engine at {member.entry.address} ended"
        self.lose(member, EngineError(problem, member.client.log))

    def _client(self, entry: Entry) -> EngineClient:
        return EngineClient(
            entry.address,
            request_timeout_s=self.config.request_timeout_s,
            log=self._source.log_of(entry),
            api_key=self._api_key,
        )

    def _none_started(self, members: Sequence[Member], timeout_s: float) -> EngineError:
        if not members:
            return self.last_loss or EngineError(
                f"start: no engine has said within {timeout_s:.3g} s that it serves"
            )
        found = members[0]
        return EngineError(
            f"start: the engine at {found.entry.address} {found.problem} after {timeout_s:.3g} s",
            found.client.log,
        )
