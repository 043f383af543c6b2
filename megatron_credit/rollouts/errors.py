"""Errors of the rollout side."""

from collections import deque
from pathlib import Path

from megatron_credit.errors import FailedProcess
from megatron_credit.rollouts import vllm_api

LOG_LINES = 15
LINE_LENGTH = 300


class EngineError(FailedProcess):
    """An engine died, hangs, or refused what it was asked; the message names it and what it did,
    and ends with the last lines of its log as it is when the message is read."""

    def __init__(self, problem: str, log_path: Path | None = None) -> None:
        super().__init__(problem)
        self.problem = problem
        self.log_path = log_path

    def __str__(self) -> str:
        return self.problem + log_tail(self.log_path)


class RequestRefused(EngineError):
    """The engine lives and says that the request is wrong; no other engine would say otherwise."""


def log_tail(path: Path | None) -> str:
    """The end of an engine's log as a part of an error message; empty where there is none.

    When the part that computes fails, the server writes a traceback for each request that was under
    way, so the cause is far from the end; its last errors are shown too.
    """
    if path is None or not path.is_file():
        return ""
    cause: deque[tuple[int, str]] = deque(maxlen=LOG_LINES)
    end: deque[tuple[int, str]] = deque(maxlen=LOG_LINES)
    with path.open(errors="replace") as log:
        for line in enumerate(log):
            end.append(line)
            if vllm_api.is_core_error(line[1]):
                cause.append(line)
    lines = [f"  {text.rstrip()[:LINE_LENGTH]}" for _, text in sorted({*cause, *end})]
    return "\n".join([f"\nthe end of {path}:", *lines])
