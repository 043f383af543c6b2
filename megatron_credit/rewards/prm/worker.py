"""The inside of a process that scores steps, for `seat.Seat`.

Its first message configures it; each later one holds calls, each of which is answered on its own,
in order. The model runs in the main thread; what it prints goes to stderr.
"""

import contextlib
import os
import resource
import signal
from collections.abc import Sequence
from typing import Any, BinaryIO, Protocol

from pydantic import TypeAdapter

from megatron_credit.rewards.prm.config import AnyPrm, CallablePrm, PrmConfig
from megatron_credit.rewards.prm.steps import ProcessSpent, StepItem
from megatron_credit.rewards.wire import receive
from megatron_credit.rewards.worker import (
    MIB,
    end_with_parent,
    prepare_process,
    private_pipes,
    send,
)

CONFIG: TypeAdapter[AnyPrm] = TypeAdapter(PrmConfig)


class Backend(Protocol):
    """Scores responses."""

    def score(self, items: Sequence[StepItem]) -> list[list[float] | str]:
        """Of each item its scores, or why there are none; what it raises holds for all of them."""
        ...


def main() -> None:
    """Scores until the other side goes away."""
    end_with_parent()
    requests, replies = private_pipes()
    settings = receive(requests)
    prepare_process()
    try:
        config = CONFIG.validate_python(settings["config"])
        # Not the address space: CUDA reserves more of it than there is memory.
        limit = config.memory_mb * MIB
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        backend = make_backend(config, check_only=settings["check_only"])
    except MemoryError:
        send(replies, {"problem": f"the PRM needs more than memory_mb = {config.memory_mb}"})
        return
    except BaseException as error:  # the user's module runs when it is imported
        told = "" if isinstance(error, ValueError) else "the PRM cannot be loaded: "
        send(replies, {"problem": f"{told}{error or type(error).__name__}"})
        return
    send(replies, {"problem": ""})
    if backend is not None:
        with contextlib.suppress(EOFError):
            serve(requests, replies, backend)


def make_backend(config: AnyPrm, *, check_only: bool) -> Backend | None:
    """The model, loaded; with check_only nothing but what can be said without its weights.

    Raises ValueError where it cannot work.
    """
    if isinstance(config, CallablePrm):
        from megatron_credit.rewards.prm.function import FunctionScorer

        return FunctionScorer(config)
    # Imports transformers, which takes seconds.
    from megatron_credit.rewards.prm.hf import HfScorer
    from megatron_credit.rewards.prm.hf_input import HfInput

    prepared = HfInput(config)
    return None if check_only else HfScorer(config, prepared)


def serve(requests: BinaryIO, replies: BinaryIO, backend: Backend) -> None:
    """Answers each call; raises EOFError when there are no more."""
    pid = os.getpid()
    while True:
        number, calls = receive(requests)
        for call in calls:
            reply = answer(backend, [StepItem(*fields) for fields in call])
            if os.getpid() != pid:
                os._exit(0)  # a function forked, and this is the copy
            signal.setitimer(signal.ITIMER_REAL, 0)
            send(replies, {"number": number, **reply})


def answer(backend: Backend, items: Sequence[StepItem]) -> dict[str, Any]:
    """The scores of each item or why there are none, as JSON. Where all at once fail, each is
    tried on its own. `spent` says why the process cannot go on."""
    try:
        return {"results": backend.score(items), "spent": ""}
    except (MemoryError, ProcessSpent) as error:
        return {"results": [], "spent": described(error)}
    except BaseException as error:  # the border to foreign code: even sys.exit is no score
        problem = described(error)
    # Outside of the handler, where the traceback no longer holds the tensors.
    if len(items) == 1:
        return {"results": [problem], "spent": ""}
    parts = [answer(backend, [item]) for item in items]
    return {
        "results": [result for part in parts for result in part["results"]],
        "spent": next((part["spent"] for part in parts if part["spent"]), ""),
    }


def described(error: BaseException) -> str:
    """What happened, in a few words."""
    return f"{type(error).__name__}: {error}"[:500]
