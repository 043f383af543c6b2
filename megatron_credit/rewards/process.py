"""The pool's side of one worker process."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from typing import Any

from megatron_credit.rewards.wire import LENGTH, MAX_BYTES, packed

# With the import path of this process, the current directory behind the standard library.
START = (
    "import os, sys; sys.path[:] = [*sys.argv[2:], os.getcwd()]; "
    "from importlib import import_module; import_module(sys.argv.pop(1)).main()"
)
VERIFIERS = "megatron_credit.rewards.worker"
SLOW_NICENESS = 19


class WorkerDied(Exception):
    """The process ended or stopped making sense; the message says how."""


class WorkerProcess:
    """A process that answers one question at a time; nothing that happens in it raises here but
    WorkerDied."""

    def __init__(self, import_path: list[str], program: str = VERIFIERS) -> None:
        """`program` is the module whose `main` runs in the process."""
        # A clean interpreter, not a fork: no locks, threads, file handles or patched modules.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", START, program, *import_path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )
        self._number = 0
        self._data = bytearray()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._replies = self._process.stdin, self._process.stdout
        for pipe in (self._requests, self._replies):
            os.set_blocking(pipe.fileno(), False)

    def configure(self, settings: dict[str, Any], limit_s: float) -> None:
        """Waits until the process is ready; WorkerDied says what keeps it from working."""
        self._send(packed(settings), limit_s)
        reply = self._receive(limit_s)
        if reply is None:
            raise WorkerDied(f"a worker process did not load within {limit_s:g} s")
        if reply["problem"]:
            raise WorkerDied(reply["problem"])

    def ask(self, question: list[Any], wait_s: float) -> dict[str, Any] | None:
        """The reply, or None when it takes longer; then `wait` may wait on."""
        self._number += 1
        self._send(packed([self._number, question]), wait_s)
        return self.wait(wait_s)

    def wait(self, wait_s: float) -> dict[str, Any] | None:
        """The reply to the last question, or None when it takes longer."""
        reply = self._receive(wait_s)
        if reply is not None and reply.get("number") != self._number:
            raise WorkerDied("it answered another question")
        return reply

    def step_back(self) -> None:
        """Leaves the CPU to the others."""
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, SLOW_NICENESS)

    def end(self) -> None:
        """Ends the process and what it started; whoever waits for it sees WorkerDied."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Ends the process and gives back what it held."""
        self.end()
        self._process.wait()
        self._requests.close()
        self._replies.close()

    def _send(self, data: bytes, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        view = memoryview(data)
        while view:
            if not _ready(self._requests.fileno(), selectors.EVENT_WRITE, deadline):
                raise WorkerDied("it does not read its questions")
            try:
                view = view[os.write(self._requests.fileno(), view) :]
            except BrokenPipeError:
                raise WorkerDied(self._end()) from None

    def _receive(self, wait_s: float) -> dict[str, Any] | None:
        deadline = time.monotonic() + wait_s
        while (size := self._message_size()) is None or len(self._data) < size:
            if not _ready(self._replies.fileno(), selectors.EVENT_READ, deadline):
                return None
            data = os.read(self._replies.fileno(), 2**16)
            if not data:
                raise WorkerDied(self._end())
            self._data += data
        message = bytes(self._data[LENGTH.size : size])
        del self._data[:size]
        return _object(message)

    def _message_size(self) -> int | None:
        """Bytes of the next message with its length; None: the length has not come yet."""
        if len(self._data) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._data)
        if length > MAX_BYTES:
            raise WorkerDied("it wrote something that is no reply")
        return LENGTH.size + length

    def _end(self) -> str:
        """How the process ended."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        return f"it ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with {code}"


def _ready(descriptor: int, event: int, deadline: float) -> bool:
    """Waits until the descriptor is ready; False when the deadline has passed."""
    with selectors.PollSelector() as selector:
        selector.register(descriptor, event)
        return bool(selector.select(max(0.0, deadline - time.monotonic())))


def _object(message: bytes) -> dict[str, Any]:
    try:
        found = json.loads(message)
    except ValueError:
        raise WorkerDied("it wrote something that is no reply") from None
    if not isinstance(found, dict):
        raise WorkerDied("it wrote something that is no reply")
    return found
