"""Scores steps in processes of their own, so that no model and no response can harm a run."""

import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self, TypeVar

from megatron_credit.rewards.prm.config import AnyPrm, CallablePrm
from megatron_credit.rewards.prm.seat import Call, Seat
from megatron_credit.rewards.prm.steps import StepItem, StepScores, no_scores
from megatron_credit.rewards.process import WorkerDied
from megatron_credit.rewards.wire import packed

Thing = TypeVar("Thing")


class StepScorer:
    """Processes with a process reward model: the first is started at construction, the others when
    they are needed; `close`, or leaving the context, ends them.

    Raises ValueError when the model cannot work.
    """

    def __init__(self, config: AnyPrm) -> None:
        self._config = config
        is_function = isinstance(config, CallablePrm)
        # A function is called for one response, a model for a batch of them.
        self._call_size = 1 if is_function else config.batch_size
        self._calls_at_once = config.batch_size if is_function else 1
        self._seats = [Seat(config) for _ in range(config.processes if is_function else 1)]
        self._free: queue.LifoQueue[Seat] = queue.LifoQueue()
        for seat in reversed(self._seats):
            self._free.put(seat)
        # Linux ends a process with the thread that started it, so these threads live with us.
        self._threads = ThreadPoolExecutor(len(self._seats), "prm")
        try:
            self._threads.submit(self._seats[0].start).result()
        except WorkerDied as death:
            self.close()
            raise ValueError(f"the process reward model cannot work: {death}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes; what is being scored has no scores. A second call does nothing."""
        for seat in self._seats:
            seat.end()
        self._threads.shutdown(cancel_futures=True)
        for seat in self._seats:
            seat.drop()

    def score(self, items: Sequence[StepItem]) -> list[StepScores]:
        """The scores of each response, in order; NaN with the reason where there are none.

        Equal responses to the same question are scored once. RuntimeError after `close`.
        """
        for seat in self._seats:
            seat.mend()
        keys = [_key(item) for item in items]
        unique = {
            key: item
            for key, item in zip(keys, items, strict=True)
            if item.steps and isinstance(key, bytes)
        }
        scored = dict(zip(unique, self._score(list(unique.values())), strict=True))
        return [
            scored[key] if key in scored else _not_asked(item, key)
            for key, item in zip(keys, items, strict=True)
        ]

    def _score(self, items: Sequence[StepItem]) -> list[StepScores]:
        # Responses of about the same length: a batch is as long as its longest.
        order = sorted(range(len(items)), key=lambda number: _size(items[number]))
        calls = _parts([items[number] for number in order], self._call_size)
        futures = [
            self._threads.submit(self._run, some) for some in _parts(calls, self._calls_at_once)
        ]
        try:
            results = [result for f in futures for call in f.result() for result in call]
        finally:
            for future in futures:
                future.cancel()
        by_number = dict(zip(order, results, strict=True))
        return [by_number[number] for number in range(len(items))]

    def _run(self, calls: Sequence[Call]) -> list[list[StepScores]]:
        seat = self._free.get()
        try:
            return seat.run(calls)
        finally:
            self._free.put(seat)


def _parts(things: Sequence[Thing], size: int) -> list[Sequence[Thing]]:
    return [things[start : start + size] for start in range(0, len(things), size)]


def _size(item: StepItem) -> int:
    return len(item.prompt) + sum(map(len, item.steps))


def _key(item: StepItem) -> bytes | str:
    """Equal for equal items; text says why an item cannot be sent."""
    try:
        return packed([item.prompt, item.steps, item.metadata])
    except (TypeError, ValueError) as error:
        return f"the metadata is not JSON: {error}"


def _not_asked(item: StepItem, key: bytes | str) -> StepScores:
    return no_scores(item, key) if isinstance(key, str) and item.steps else StepScores(())
