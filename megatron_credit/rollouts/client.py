"""Speaks to one engine over HTTP: token ids in, token ids with their log-probs out."""

import asyncio
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

import httpx

from megatron_credit.batch.rollout import Completion
from megatron_credit.rollouts import vllm_api
from megatron_credit.rollouts.connections import Connections
from megatron_credit.rollouts.engine_log import EngineLog
from megatron_credit.rollouts.errors import EngineError, RequestRefused

SLOW = "does not say how it is"
POLL_S = 0.2
WATCH_S = 1.0
"""How often a waiting client asks whether the engine is still healthy."""
HEALTH_S = 5.0
"""How long it may take to say so."""
CACHE_RESET_S = 10.0
"""How long requests that end just now may hold blocks of the cache that is to be reset."""


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """Samples of one prompt, their seeds counting upwards from `seed`; temperature 0 is greedy."""

    prompt_ids: Sequence[int]
    num_samples: int
    temperature: float
    max_new_tokens: int
    stop_token_ids: Sequence[int]
    seed: int


class Engine(Protocol):
    """What samples: one engine, or a fleet of them."""

    def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        """For each request its samples, in order."""
        ...


class Readiness(NamedTuple):
    """Whether an engine serves."""

    problem: str | None
    """What is wrong; None: it serves."""
    version: int | None = None
    """The number of its weights, where it serves."""


class EngineClient:
    """One engine. Every method raises EngineError, within its timeout, when the engine is dead,
    hangs or refuses, with the address, what was asked and the end of the log where it is known.

    Requests run in an event loop on a daemon thread, where each has one deadline and can be dropped
    while it waits; an engine whose core died leaves requests open that nobody will ever answer.
    """

    def __init__(
        self,
        address: str,
        *,
        request_timeout_s: float,
        log: EngineLog | None = None,
        api_key: str | None = None,
    ) -> None:
        self.address = address
        self.log = log
        self._timeout_s = request_timeout_s
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._connections = Connections(address, headers)
        self._watch = Connections(address, headers)  # the others may all be waiting
        self._next_watch = 0.0
        self._is_left = False
        self._loop = asyncio.new_event_loop()
        threading.Thread(
            target=self._loop.run_forever, name=f"engine {address}", daemon=True
        ).start()

    def wait_ready(self, timeout_s: float) -> None:
        """Returns when the engine serves; EngineError when it does not within the timeout, or when
        something else answers at the address."""
        deadline = time.monotonic() + timeout_s
        while (problem := self.begin_readiness().result().problem) is not None:
            if time.monotonic() > deadline:
                raise self._error("start", f"{problem} after {timeout_s:.3g} s")
            time.sleep(POLL_S)

    def begin_readiness(self) -> Future:
        """Begins to ask whether the engine serves; the result is a `Readiness`, or EngineError
        where something else answers."""
        return self._run(self._readiness())

    def begin_pulse(self, timeout_s: float) -> Future:
        """Begins to ask the process that computes for a sign of life, which it gives between two
        steps; EngineError where it gives none."""
        return self._run(self._pulse(timeout_s))

    def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        """For each request its samples, in order. All requests are in flight together, and the
        timeout holds for all of them together."""
        answers = [self.begin_generate(request) for request in requests]
        collect(answers)
        return [vllm_api.completions(answer.result()) for answer in answers]

    def begin_generate(self, request: GenerateRequest) -> Future:
        """Begins to sample; `vllm_api.completions` reads the result."""
        body = vllm_api.generate_request(**asdict(request))
        return self.begin_post(
            vllm_api.GENERATE, body, self._timeout_s, "generation", repeatable=True
        )

    def reset_prefix_cache(self) -> None:
        """Forgets keys and values that older weights computed."""
        deadline = time.monotonic() + CACHE_RESET_S
        phase = "prefix cache reset"
        while not vllm_api.cache_was_reset(
            self.post(vllm_api.RESET_CACHE, None, self._timeout_s, phase)
        ):
            if time.monotonic() > deadline:
                raise self._error(phase, "keeps the keys and values of requests that still run")
            time.sleep(POLL_S)

    def weight_version(self) -> int:
        """The number of the weights in use; -1 for those that the engine loaded itself."""
        return self._run(self._ask_version()).result()

    async def _ask_version(self) -> int:
        answer = await self._request(
            "GET", vllm_api.VERSION, None, self._timeout_s, "weight version", repeatable=True
        )
        if not isinstance(answer, dict) or "weight_version" not in answer:
            raise self._error("weight version", f"gave no version: {str(answer)[:200]}")
        try:
            return vllm_api.version_number(answer["weight_version"])
        except ValueError:
            raise self._error(
                "weight version", f"runs weights that we did not number: {str(answer)[:200]}"
            ) from None

    def post(self, path: str, body: Any, timeout_s: float, purpose: str) -> Any:
        """The JSON answer to a POST."""
        return self.begin_post(path, body, timeout_s, purpose).result()

    def begin_post(
        self, path: str, body: Any, timeout_s: float, purpose: str, *, repeatable: bool = False
    ) -> Future:
        """Begins a POST; the result is its JSON answer. Cancelling it drops the connection."""
        asked = self._request("POST", path, body, timeout_s, purpose, repeatable=repeatable)
        return self._run(asked)

    def close(self) -> None:
        """Drops what is under way and closes the connections."""
        if not self._loop.is_closed():
            self._run(self._close()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)

    def abandon(self) -> None:
        """As `close`, without waiting: the engine may be one that answers nothing."""
        closing = self._run(self._close())
        self._is_left = True
        closing.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))

    async def _close(self) -> None:
        under_way = asyncio.all_tasks() - {asyncio.current_task()}
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        await self._connections.close()
        await self._watch.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Future:
        if self._is_left:  # its loop would never begin
            work.close()
            refused: Future = Future()
            refused.set_exception(self._error("client", "was given up"))
            return refused
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _request(
        self,
        method: str,
        path: str,
        body: Any,
        timeout_s: float,
        purpose: str,
        *,
        repeatable: bool = False,
    ) -> Any:
        asked = self._connections.request(method, path, body, repeatable=repeatable)
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._watched(asked, purpose)
        except TimeoutError:
            raise self._error(purpose, f"gave no answer within {timeout_s:.3g} s") from None
        except httpx.HTTPError as error:
            raise self._error(purpose, f"broke the connection ({error!r})") from None
        if answer.status_code != 200:
            kind = RequestRefused if 400 <= answer.status_code < 500 else EngineError
            problem = f"answered {answer.status_code}: {answer.text[:500]}"
            raise kind(self._problem(purpose, problem), self.log)
        try:
            return answer.json() if answer.content else None
        except ValueError:
            raise self._error(purpose, "answered something that is not JSON") from None

    async def _watched(
        self, asked: Coroutine[Any, Any, httpx.Response], purpose: str
    ) -> httpx.Response:
        """The answer; EngineError as soon as the engine is known to be dead while it is awaited."""
        asking = asyncio.ensure_future(asked)
        try:
            while not (await asyncio.wait({asking}, timeout=WATCH_S))[0]:
                if time.monotonic() >= self._next_watch:
                    self._next_watch = time.monotonic() + WATCH_S
                    problem = await self._ask_health()
                    # A server that is slow to say how it is may be busy; the deadline stands.
                    if problem is not None and not asking.done() and problem != SLOW:
                        raise self._error(purpose, f"died while it was awaited: it {problem}")
            return asking.result()
        finally:
            asking.cancel()

    async def _readiness(self) -> Readiness:
        problem = await self._ask_health()
        if problem is not None:
            return Readiness(problem)
        return Readiness(None, await self._ask_version())

    async def _pulse(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._watch.request("GET", vllm_api.PULSE, None, repeatable=True)
        except TimeoutError:
            raise self._error(
                "generation", f"hangs: it has given no sign of life for {timeout_s:.3g} s"
            ) from None
        except httpx.HTTPError as error:
            raise self._error("generation", f"broke the connection ({error!r})") from None
        if answer.status_code >= 500:
            raise self._error("generation", f"died: {vllm_api.PULSE} says {answer.status_code}")

    async def _ask_health(self) -> str | None:
        """What is wrong with the engine; None: it is healthy."""
        try:
            async with asyncio.timeout(HEALTH_S):
                status = (await self._watch.request("GET", vllm_api.HEALTH, None)).status_code
        except TimeoutError:
            return SLOW
        except httpx.HTTPError as error:
            return f"does not answer ({type(error).__name__})"
        return None if status == 200 else f"is not healthy ({vllm_api.HEALTH} says {status})"

    def _error(self, purpose: str, problem: str) -> EngineError:
        return EngineError(self._problem(purpose, problem), self.log)

    def _problem(self, purpose: str, problem: str) -> str:
        return f"{purpose}: the engine at {self.address} {problem}"


def collect(answers: list[Future]) -> None:
    """Waits for all answers; raises the first error as soon as it is there and drops the rest."""
    done, unfinished = wait(answers, return_when=FIRST_EXCEPTION)
    for answer in unfinished:  # none unless one failed
        answer.cancel()
    for answer in done:
        answer.result()
