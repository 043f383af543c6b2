"""Checks answers in processes of their own, so that no answer and no verifier can harm a run."""

import os
import queue
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Self

from megatron_credit.rewards.config import AnyVerifierConfig, PoolConfig
from megatron_credit.rewards.process import WorkerDied, WorkerProcess
from megatron_credit.rewards.verdict import Verdict
from megatron_credit.rewards.verifier import NO_ANSWER, find
from megatron_credit.rewards.wire import packed

MAX_DEFAULT_WORKERS = 16
# An answer that takes longer no longer holds a place: a spare process takes over, and the slow one
# goes on at the lowest priority until its time is up.
PATIENCE_S = 0.3
TRIES = 2
"""A process can die of what an earlier answer left behind, so only a second death is an error."""


@dataclass(frozen=True)
class Question:
    """A response to check."""

    verifier: str
    """Name of the verifier in the pool."""
    text: str
    """The whole response."""
    answer: str
    """The reference answer."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """What the data knows of the question; it must be JSON."""


Reply = dict[str, Any]


class VerifierPool:
    """Processes that check answers, started at construction and ended by `close`.

    Raises ValueError when a verifier cannot work: a function or a library that is not there.
    """

    def __init__(self, verifiers: Mapping[str, AnyVerifierConfig], settings: PoolConfig) -> None:
        self._verifiers = dict(verifiers)
        self._limit_s = settings.time_limit_s
        self._start_limit_s = settings.start_limit_s
        self._to_worker = {
            "verifiers": {name: config.model_dump() for name, config in verifiers.items()},
            "memory_mib": settings.memory_mib,
        }
        num_workers = settings.workers or min(os.cpu_count() or 1, MAX_DEFAULT_WORKERS)
        self._num_threads = 2 * num_workers + 2
        # One more than there are cores for: an answer that hangs takes nobody's place.
        self._turns = threading.Semaphore(num_workers + 1)
        self._idle: queue.LifoQueue[WorkerProcess | WorkerDied] = queue.LifoQueue()
        self._alive: set[WorkerProcess] = set()
        self._lock = threading.Lock()
        self._closed = False
        # Linux ends a process with the thread that started it, so these threads live with the pool.
        self._starters = ThreadPoolExecutor(self._num_threads, "verifier-start")
        self._askers = ThreadPoolExecutor(self._num_threads, "verifier")
        for _ in range(num_workers + 1):
            self._order_worker()
        try:
            self._idle.put(self._take_worker())
        except WorkerDied as death:
            self.close()
            raise ValueError(str(death)) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes; what is being checked has no verdict. A second call does nothing."""
        with self._lock:
            self._closed = True
            for worker in self._alive:
                worker.end()
        for _ in range(self._num_threads):
            self._idle.put(WorkerDied("the pool was closed"))
        self._askers.shutdown(cancel_futures=True)
        self._starters.shutdown(cancel_futures=True)
        for worker in tuple(self._alive):
            self._discard(worker)

    def grade(self, questions: Sequence[Question]) -> list[Verdict]:
        """The verdict on each response, in order. Equal answers to the same question are checked
        once."""
        found = [find(question.text, self._config(question)) for question in questions]
        replies = self._ask_all(
            [
                [] if text is None else ["answer", q.verifier, text, q.answer, q.metadata]
                for q, text in zip(questions, found, strict=True)
            ]
        )
        return [
            NO_ANSWER if text is None else _verdict(reply)
            for text, reply in zip(found, replies, strict=True)
        ]

    def check_references(self, questions: Sequence[Question]) -> list[str | None]:
        """What is wrong with each reference answer, in words; None: nothing."""
        replies = self._ask_all(
            [["reference", q.verifier, "", q.answer, q.metadata] for q in questions]
        )
        return [reply.get("problem") or None for reply in replies]

    def _config(self, question: Question) -> AnyVerifierConfig:
        if question.verifier not in self._verifiers:
            known = ", ".join(self._verifiers)
            raise ValueError(f"the pool has no verifier {question.verifier!r}; it has {known}")
        return self._verifiers[question.verifier]

    def _ask_all(self, messages: Sequence[list[Any]]) -> list[Reply]:
        """The replies in order; an empty message has an empty one."""
        keys = [_key(message) for message in messages]
        unique = {key: message for key, message in zip(keys, messages, strict=True) if message}
        futures = {
            key: self._askers.submit(self._reply, message)
            for key, message in unique.items()
            if isinstance(key, bytes)
        }
        try:
            return [futures[key].result() if key in futures else _failure(key) for key in keys]
        finally:
            for future in futures.values():
                future.cancel()

    def _reply(self, message: list[Any]) -> Reply:
        """What a worker says; a failure where it dies or takes too long."""
        for tries_left in reversed(range(TRIES)):
            try:
                return self._ask(message) or _failure(
                    f"no verdict within {self._limit_s:g} s", outcome="timeout"
                )
            except WorkerDied as death:
                if self._closed or not tries_left:
                    return _failure(f"the verifier's process died: {death}")
        raise AssertionError("unreachable: the last try returns")

    def _ask(self, message: list[Any]) -> Reply | None:
        """One question to one worker; None when the time is up."""
        self._turns.acquire()
        on_turn, reply, worker = True, None, None
        try:
            worker = self._take_worker()
            reply = worker.ask(message, min(PATIENCE_S, self._limit_s))
            if reply is None:
                self._turns.release()
                on_turn = False
                worker.step_back()
                self._order_worker()
                reply = worker.wait(self._limit_s - PATIENCE_S)
            return reply
        finally:
            if on_turn:
                self._turns.release()
            if worker is not None:
                reusable = on_turn and reply is not None and not reply["full"]
                self._return_worker(worker, reusable=reusable, replaced=not on_turn)

    def _take_worker(self) -> WorkerProcess:
        """An idle worker. Raises WorkerDied when one could not start and orders another."""
        found = self._idle.get()
        if isinstance(found, WorkerDied):
            self._order_worker()
            raise found
        return found

    def _return_worker(self, worker: WorkerProcess, *, reusable: bool, replaced: bool) -> None:
        if reusable:
            self._idle.put(worker)
            return
        self._discard(worker)
        if not replaced:
            self._order_worker()

    def _order_worker(self) -> None:
        with self._lock:
            if not self._closed:
                self._starters.submit(self._start_worker)

    def _start_worker(self) -> None:
        """Adds a worker to the idle ones, or why it could not start."""
        try:
            worker = WorkerProcess(sys.path)
        except OSError as error:
            self._idle.put(WorkerDied(f"a verifier process cannot start: {error}"))
            return
        with self._lock:
            self._alive.add(worker)
            if self._closed:
                worker.end()
        try:
            worker.configure(self._to_worker, self._start_limit_s)
        except WorkerDied as death:
            self._discard(worker)
            self._idle.put(death)
        else:
            self._idle.put(worker)

    def _discard(self, worker: WorkerProcess) -> None:
        worker.kill()
        with self._lock:
            self._alive.discard(worker)


def _key(message: list[Any]) -> bytes | str:
    """Equal for equal messages; text says why a message cannot be sent."""
    try:
        return packed(message)
    except (TypeError, ValueError) as error:
        return f"the metadata is not JSON: {error}"


def _failure(detail: bytes | str, *, outcome: str = "error") -> Reply:
    return {"outcome": outcome, "parsed": None, "detail": detail, "problem": detail}


def _verdict(reply: Reply) -> Verdict:
    return Verdict(reply["outcome"], reply["parsed"], reply["detail"])
