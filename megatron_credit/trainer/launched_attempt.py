"""One attempt of a launched run as its trainer sees it: small files that the supervisor reads.

All of them appear whole, by rename or as a file that must not exist before.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from megatron_credit.errors import lasts
from megatron_credit.trainer.run_directory import replace_text


@dataclass(frozen=True)
class Failure:
    """Why an attempt ends."""

    reason: str
    retry: bool
    """Whether another attempt may succeed without anybody changing anything."""
    task: str = "trainer"
    rank: int | None = None
    """Global rank of the process that knows."""
    phase: str | None = None
    """What it was doing."""


class Superseded(RuntimeError):
    """A later attempt owns the run: this one was cut off and must not write any more."""


class LaunchedAttempt:
    """The directory RUN/launch/attempt-NNN and the run's own markers beside it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        self.number = int(directory.name.rpartition("-")[2])
        self.stop = self.directory / "STOP"
        self.stopped = self.directory / "STOPPED"
        self.failure = self.directory / "failure.json"
        self.start = self.directory / "start.json"
        self._current = self.directory.parent / "current"
        self._done = self.directory.parent / "DONE"

    def require_current(self) -> None:
        """Raises Superseded where a later attempt was started, on other nodes."""
        current = int(self._current.read_text())
        if current != self.number:
            raise Superseded(
                f"attempt {current} of this run was started while attempt {self.number} was cut "
                "off from the cluster; this one ends and writes nothing more"
            )

    def write_stopped(self, step: int) -> None:
        """Says that the run was saved after `step` because it was asked to stop."""
        replace_text(self.stopped, json.dumps({"step": step}))

    def write_done(self) -> None:
        """Says that the run is complete: the only sign of success."""
        replace_text(self._done, "")

    def report(self, failure: Failure) -> None:
        """Says why the attempt ends; what was said first stands."""
        text = json.dumps(asdict(failure))
        handle, partial = tempfile.mkstemp(prefix=".failure-", dir=self.directory)
        with open(handle, "w") as stream:
            stream.write(text)
        try:
            os.link(partial, self.failure)
        except FileExistsError:
            pass
        finally:
            os.unlink(partial)


def report_uncaught(
    attempt: LaunchedAttempt, failure_of: Callable[[BaseException], Failure | None]
) -> None:
    """From here on an error that ends this process is also the attempt's, as `failure_of` says it;
    None: it says nothing of the attempt."""
    print_traceback = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        print_traceback(kind, error, traceback)
        failure = failure_of(error)
        if failure is not None:
            attempt.report(failure)

    sys.excepthook = hook


def can_be_tried_again(error: BaseException) -> bool:
    """Whether the same configuration on other nodes, or later, may not meet this error."""
    return not (isinstance(error, ValueError) or (isinstance(error, OSError) and lasts(error)))
