"""The inside of a process that checks answers, one after the other, for `process.WorkerProcess`.

Its first message configures it; each later one is a question, answered in order. Verifiers run in
the main thread, so that they may use signals. What they print goes to stderr.
"""

import contextlib
import ctypes
import os
import resource
import signal
from typing import Any, BinaryIO

from pydantic import TypeAdapter

from megatron_credit.rewards.config import VerifierConfig
from megatron_credit.rewards.verifier import Verifier, make_verifier
from megatron_credit.rewards.wire import packed, receive

LIBC = ctypes.CDLL(None, use_errno=True)
CONFIGS: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, VerifierConfig])
MIB = 2**20
NICENESS = 5
# A process that has used this share of its memory is replaced before the next answer fails in it.
FULL = 0.75


def main() -> None:
    """Answers until the pool goes away."""
    end_with_parent()
    requests, replies = private_pipes()
    settings = receive(requests)
    prepare_process()
    try:
        configs = CONFIGS.validate_python(settings["verifiers"])
        verifiers = {name: make_verifier(config) for name, config in configs.items()}
    except BaseException as error:  # the user's module runs when it is imported
        told = "" if isinstance(error, ValueError) else "a verifier's module fails: "
        send(replies, {"problem": f"{told}{error or type(error).__name__}"})
        return
    limit = settings["memory_mib"] * MIB
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    send(replies, {"problem": ""})
    with contextlib.suppress(EOFError):
        serve(requests, replies, verifiers, limit)


def serve(
    requests: BinaryIO, replies: BinaryIO, verifiers: dict[str, Verifier], limit: int
) -> None:
    """Answers each question; raises EOFError when there are no more."""
    pid = os.getpid()
    while True:
        number, question = receive(requests)
        reply = answer(question, verifiers)
        if os.getpid() != pid:
            os._exit(0)  # a verifier forked, and this is the copy
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(replies, {"number": number, "full": address_space() > FULL * limit, **reply})


def answer(question: list[Any], verifiers: dict[str, Verifier]) -> dict[str, Any]:
    """The verdict or the reference's problem, as JSON."""
    task, name, text, reference, metadata = question
    try:
        if task == "reference":
            return {"problem": verifiers[name].check_reference(reference, metadata) or ""}
        verdict = verifiers[name].compare(text, reference, metadata)
        return {"outcome": verdict.outcome, "parsed": verdict.parsed, "detail": verdict.detail}
    except BaseException as error:  # the border to foreign code: even sys.exit is no verdict
        detail = f"{type(error).__name__}: {error}"[:500]
        return {"outcome": "error", "parsed": None, "detail": detail, "problem": detail}


def private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The pipes to the pool, moved away from where a verifier's input() and print() would go."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def prepare_process() -> None:
    """One thread for numerical libraries; behind the trainer in CPU time, before it in memory
    shortage."""
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
    os.nice(NICENESS)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")


def end_with_parent() -> None:
    """Asks the kernel to kill this process when its parent dies, however that happens (Linux)."""
    parent = os.getppid()
    LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(0)  # it died before the call


def address_space() -> int:
    """Bytes that count against the memory limit."""
    with open("/proc/self/statm") as sizes:
        return int(sizes.read().split()[0]) * resource.getpagesize()


def send(replies: BinaryIO, message: dict[str, Any]) -> None:
    """Writes one message."""
    replies.write(packed(message))
    replies.flush()
