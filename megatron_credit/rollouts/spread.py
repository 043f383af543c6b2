"""Spreads requests over engines that may be lost, until each has its answer, once."""

import queue
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Protocol

from megatron_credit.batch.rollout import Completion
from megatron_credit.rollouts import vllm_api
from megatron_credit.rollouts.client import GenerateRequest
from megatron_credit.rollouts.config import EngineConfig
from megatron_credit.rollouts.connections import MAX_CONNECTIONS
from megatron_credit.rollouts.errors import EngineError, RequestRefused
from megatron_credit.rollouts.members import Member

MAX_DEATHS = 3
"""Engines that are lost with a request before it is held to be the cause."""
TICK_S = 0.2
PULSE_S = 2.0
"""How long after a sign of life the next one is asked for."""


class Crew(Protocol):
    """What a spread asks of the fleet."""

    config: EngineConfig
    num_reissued: int
    last_loss: EngineError | None
    is_stopped: bool

    @property
    def can_replace(self) -> bool:
        """Whether an engine may yet come in place of one that is lost."""
        ...

    def current(self) -> list[Member]:
        """The engines that serve the current weights."""
        ...

    def lose(self, member: Member, error: EngineError) -> None:
        """The engine is used no more."""
        ...


@dataclass(eq=False)
class Asked:
    """A request without an answer."""

    number: int
    request: GenerateRequest
    deaths: int = 0
    """Engines that were lost while they had it."""

    @property
    def is_suspect(self) -> bool:
        """One more, and it is the cause: no other suspect may run beside it then."""
        return self.deaths == MAX_DEATHS - 1


@dataclass(frozen=True, eq=False)
class Flight:
    """A request that an engine has."""

    asked: Asked
    member: Member
    version: int | None
    """The weights of the engine when it got it."""


class Spread:
    """One batch of requests on its way. An engine has as many of them as it decodes together, so
    that the others, and those that come later, get their share."""

    def __init__(self, crew: Crew, requests: Sequence[GenerateRequest]) -> None:
        self._crew = crew
        self._waiting = [Asked(number, request) for number, request in enumerate(requests)]
        self._answers: list[list[Completion] | None] = [None] * len(requests)
        self._flights: dict[Future, Flight] = {}
        self._held: dict[Member, set[Future]] = defaultdict(set)
        self._load: dict[Member, int] = defaultdict(int)
        """Samples that the engine has still to give."""
        self._arrived: queue.SimpleQueue[Future] = queue.SimpleQueue()
        self._pulses: dict[Member, Future] = {}
        self._next_pulse: dict[Member, float] = {}
        self._alone_since: float | None = None

    def run(self) -> list[list[Completion]]:
        """The samples of each request; errors as `Fleet.generate` says."""
        try:
            while self._waiting or self._flights:
                if self._crew.is_stopped:
                    raise EngineError("generation: it was stopped")
                members = self._crew.current()
                self._leave_lost()
                self._require_engines(members)
                self._dispatch(members)
                self._take_arrived()
                self._feel_pulses()
        finally:
            for future in [*self._flights, *self._pulses.values()]:
                future.cancel()
        found = [answer for answer in self._answers if answer is not None]
        assert len(found) == len(self._answers)
        return found

    def _dispatch(self, members: Sequence[Member]) -> None:
        while self._waiting and members:
            asked = self._waiting[0]
            able = [member for member in members if self._has_room(member, asked)]
            if not able:
                return
            member = min(able, key=lambda one: self._load[one])
            self._waiting.pop(0)
            future = member.client.begin_generate(asked.request)
            self._flights[future] = Flight(asked, member, member.version)
            self._held[member].add(future)
            self._load[member] += asked.request.num_samples
            future.add_done_callback(self._arrived.put)

    def _has_room(self, member: Member, asked: Asked) -> bool:
        if member.loss is not None:
            return False
        held = self._held[member]
        if asked.is_suspect and any(self._flights[future].asked.is_suspect for future in held):
            return False
        load = self._load[member] + asked.request.num_samples
        limit = self._crew.config.max_num_seqs
        return not held or (load <= limit and len(held) < MAX_CONNECTIONS)

    def _take_arrived(self) -> None:
        """Takes what has arrived, after a moment's wait for the first."""
        try:
            self._take(self._arrived.get(timeout=TICK_S))
            while True:
                self._take(self._arrived.get_nowait())
        except queue.Empty:
            return

    def _take(self, future: Future) -> None:
        flight = self._flights.get(future)
        if flight is None:  # of an engine that is lost: somebody else has been asked
            return
        try:
            answer = vllm_api.completions(future.result())
            require_sound(answer, flight)
        except RequestRefused:
            raise
        except CancelledError:  # by another thread, which gave the engine up
            problem = f"generation: the engine at {flight.member.entry.address} was given up"
            self._lose(flight.member, EngineError(problem, flight.member.client.log))
        except EngineError as error:
            self._lose(flight.member, error)
        else:
            self._land(future, answer)

    def _land(self, future: Future, answer: list[Completion]) -> None:
        flight = self._flights.pop(future)
        self._held[flight.member].remove(future)
        self._load[flight.member] -= flight.asked.request.num_samples
        assert self._answers[flight.asked.number] is None
        self._answers[flight.asked.number] = answer

    def _leave_lost(self) -> None:
        for member in self._busy():
            if member.loss is not None:
                self._lose(member, member.loss)

    def _lose(self, member: Member, error: EngineError) -> None:
        """Takes back what the engine had. EngineError where that explains why it was lost."""
        self._crew.lose(member, error)
        self._pulses.pop(member, None)
        self._load.pop(member, None)
        mine = self._held.pop(member, set())
        for future in mine:
            asked = self._flights.pop(future).asked
            future.cancel()
            asked.deaths += 1
            self._waiting.append(asked)
            if asked.deaths == MAX_DEATHS:
                raise EngineError(
                    f"{error.problem}; it is engine number {MAX_DEATHS} that was lost with "
                    f"{describe(asked.request)}",
                    error.log,
                )
        self._crew.num_reissued += len(mine)
        self._waiting.sort(key=lambda asked: (asked.deaths, asked.number))

    def _busy(self) -> list[Member]:
        return [member for member, held in self._held.items() if held]

    def _require_engines(self, members: Sequence[Member]) -> None:
        """EngineError when there has been no engine for too long."""
        if members:
            self._alone_since = None
            return
        last = self._crew.last_loss or EngineError("generation: no engine serves")
        if not self._crew.can_replace:
            raise last
        now = time.monotonic()
        self._alone_since = self._alone_since or now
        patience = self._crew.config.startup_timeout_s
        if now - self._alone_since > patience:
            raise EngineError(
                f"generation: no engine has served for {patience:.3g} s; of the last one: "
                f"{last.problem}",
                last.log,
            )

    def _feel_pulses(self) -> None:
        """Engines that compute are asked for a sign of life; one that gives none is lost."""
        now = time.monotonic()
        for member in self._busy():
            pulse = self._pulses.get(member)
            if pulse is None:
                if now >= self._next_pulse.get(member, 0.0):
                    self._pulses[member] = member.client.begin_pulse(
                        self._crew.config.hang_timeout_s
                    )
            elif pulse.done():
                self._pulses.pop(member)
                self._next_pulse[member] = now + PULSE_S
                error = None if pulse.cancelled() else pulse.exception()
                if isinstance(error, EngineError):
                    self._lose(member, error)


def require_sound(answer: Sequence[Completion], flight: Flight) -> None:
    """EngineError where these are not samples of the weights that the engine was given."""
    member, wanted = flight.member, flight.asked.request.num_samples
    problem = ""
    if len(answer) != wanted:
        problem = f"answered {len(answer)} samples in place of {wanted}"
    if member.version is not None:
        given = {flight.version, member.version}
        labels = {span.version for one in answer for span in one.versions}
        is_labelled = all(one.versions for one in answer if one.token_ids)
        if not labels <= given or not is_labelled:
            problem = f"sampled with weights {sorted(labels)}, but was given {member.version}"
    if problem:
        raise EngineError(
            f"generation: the engine at {member.entry.address} {problem}", member.client.log
        )


def describe(request: GenerateRequest) -> str:
    """The request in an error message."""
    tokens = list(request.prompt_ids)
    shown = f"{tokens[:8]} .. {tokens[-4:]}" if len(tokens) > 12 else str(tokens)
    return (
        f"the request for {request.num_samples} samples of at most {request.max_new_tokens} tokens "
        f"with seed {request.seed} of the prompt of {len(tokens)} tokens {shown}"
    )
