"""The engines that take part in one weight sync; those that fail drop out, the others go on."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

from megatron_credit.rollouts.client import EngineClient
from megatron_credit.rollouts.errors import EngineError

Answers = dict[EngineClient, Future]


class Participants:
    """Engines that are asked together, each as if the others were not there."""

    def __init__(self, clients: Sequence[EngineClient], *, timeout_s: float) -> None:
        """`timeout_s` bounds each step of the sync."""
        self.live = list(clients)
        self.failed: dict[EngineClient, EngineError] = {}
        self.timeout_s = timeout_s

    def fail(self, client: EngineClient, error: EngineError) -> None:
        """The engine takes part no more."""
        if client in self.live:
            self.live.remove(client)
            self.failed[client] = error

    def begin(
        self,
        path: str,
        body: Callable[[EngineClient], Any],
        phase: str,
        *,
        timeout_s: float | None = None,
    ) -> Answers:
        """Begins the same POST at all of them, each with its body."""
        timeout_s = timeout_s or self.timeout_s
        return {
            client: client.begin_post(path, body(client), timeout_s, f"weight sync, {phase}")
            for client in self.live
        }

    def collect(self, answers: Answers, phase: str) -> dict[EngineClient, Any]:
        """What those that live answered, all within one timeout from now."""
        deadline = time.monotonic() + self.timeout_s
        found = {}
        for client, answer in answers.items():
            try:
                found[client] = answer.result(max(0.0, deadline - time.monotonic()))
            except EngineError as error:
                self.fail(client, error)
            except (TimeoutError, CancelledError):
                answer.cancel()
                problem = f"gave no answer within {self.timeout_s:.3g} s"
                self.fail(client, sync_error(client, phase, problem))
        return {client: value for client, value in found.items() if client in self.live}

    def ask(self, path: str, body: Any, phase: str) -> dict[EngineClient, Any]:
        """What those that live answer to the same POST."""
        return self.collect(self.begin(path, lambda _: body, phase), phase)

    def drop_failed(self, answers: Answers) -> None:
        """Engines drop out whose answer, which should come later, is an error already."""
        for client, answer in answers.items():
            if client in self.live and has_failed(answer):
                self.collect({client: answer}, "transfer")


def has_failed(answer: Future) -> bool:
    """Whether there will be no answer any more."""
    return answer.done() and (answer.cancelled() or answer.exception() is not None)


def sync_error(client: EngineClient, phase: str, problem: str) -> EngineError:
    """An error of one engine in a phase of a sync."""
    return EngineError(
        f"weight sync, {phase}: the engine at {client.address} {problem}", client.log
    )
