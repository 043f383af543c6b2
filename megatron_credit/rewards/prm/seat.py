"""A place for one process that scores steps."""

import sys
import threading
from collections.abc import Iterator, Sequence

from megatron_credit.rewards.prm.config import AnyPrm
from megatron_credit.rewards.prm.steps import StepItem, StepScores, no_scores
from megatron_credit.rewards.process import WorkerDied, WorkerProcess

PROGRAM = "megatron_credit.rewards.prm.worker"

Call = Sequence[StepItem]
"""What the model scores at once: one response for a function, a batch for a model."""


class Seat:
    """Runs calls in a process, a new one after each that dies or takes too long."""

    def __init__(self, config: AnyPrm, *, check_only: bool = False) -> None:
        self._config = config
        self._settings = {"config": config.model_dump(mode="json"), "check_only": check_only}
        self._worker: WorkerProcess | None = None
        self._broken: WorkerDied | None = None
        self._lock = threading.Lock()
        self._closed = False

    def start(self) -> WorkerProcess:
        """The process, ready. Raises WorkerDied where it cannot work, then at every call until
        `mend`: a start that hangs must not be waited for again and again."""
        if self._broken is not None:
            raise self._broken
        if self._worker is None:
            try:
                self._new_worker().configure(self._settings, self._config.start_limit_s)
            except WorkerDied as death:
                self._broken = death
                self.drop()
                raise
        assert self._worker is not None
        return self._worker

    def mend(self) -> None:
        """Lets a process that could not start try again."""
        self._broken = None

    def run(self, calls: Sequence[Call]) -> list[list[StepScores]]:
        """The scores of each call's responses; NaN where the process did not give any."""
        found: list[list[StepScores]] = []
        while len(found) < len(calls):
            try:
                for results in self._results(calls[len(found) :]):
                    found.append(results)
            except TimeoutError as late:
                self.drop()
                found.append([no_scores(item, str(late)) for item in calls[len(found)]])
            except WorkerDied:
                # It can die of what an earlier call left behind, or of the size of a batch.
                self.drop()
                found.append([self._alone(item) for item in calls[len(found)]])
        return found

    def end(self) -> None:
        """Ends the process for good; a call that waits for it gets no scores."""
        with self._lock:
            self._closed = True
            if self._worker is not None:
                self._worker.end()

    def drop(self) -> None:
        """Ends the process and gives back what it held."""
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()

    def _alone(self, item: StepItem) -> StepScores:
        """The second and last try of a response."""
        try:
            ((result,),) = self._results([[item]])
        except TimeoutError as late:
            self.drop()
            return no_scores(item, str(late))
        except WorkerDied as death:
            self.drop()
            return no_scores(item, f"the PRM's process failed: {death}")
        return result

    def _results(self, calls: Sequence[Call]) -> Iterator[list[StepScores]]:
        """The results of one call after the other, as they come.

        Raises TimeoutError or WorkerDied at the first call that has none.
        """
        limit_s = self._config.timeout_s
        worker = self.start()
        message = [[[i.prompt, i.steps, i.metadata] for i in call] for call in calls]
        for number, call in enumerate(calls):
            reply = worker.wait(limit_s) if number else worker.ask(message, limit_s)
            if reply is None:
                raise TimeoutError(f"no scores within {limit_s:g} s")
            if reply["spent"]:
                raise WorkerDied(reply["spent"])
            yield [_result(*pair) for pair in zip(call, reply["results"], strict=True)]

    def _new_worker(self) -> WorkerProcess:
        with self._lock:
            if self._closed:
                raise WorkerDied("the scorer was closed")
            try:
                self._worker = WorkerProcess(sys.path, PROGRAM)
            except OSError as error:
                raise WorkerDied(f"a process cannot start: {error}") from None
            return self._worker


def _result(item: StepItem, result: list[float] | str) -> StepScores:
    return no_scores(item, result) if isinstance(result, str) else StepScores(tuple(result))
