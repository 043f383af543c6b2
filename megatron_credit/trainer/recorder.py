"""Metrics and progress of a run, written by rank 0."""

import time

from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.launched_attempt import LaunchedAttempt
from megatron_credit.trainer.loggers import open_loggers
from megatron_credit.trainer.metrics import MetricsLog
from megatron_credit.trainer.run_directory import RunDirectory
from megatron_credit.trainer.watchdog import Watchdog


class RunRecorder:
    """Writes metrics.jsonl and status.json, and feeds the loggers."""

    def __init__(self, config: RunConfig, directory: RunDirectory, *, last_step: int) -> None:
        self._directory = directory
        self._num_steps = config.trainer.steps
        loggers = open_loggers(
            config.loggers,
            directory.root,
            settings=config.model_dump(mode="json"),
            last_step=last_step,
        )
        self._metrics = MetricsLog(directory.metrics, loggers, last_step=last_step)

    def phase(self, step: int, name: str) -> None:
        """Tells whoever watches what the run is doing since when."""
        self._directory.write_status(
            {"step": step, "steps": self._num_steps, "phase": name, "since": time.time()}
        )

    def record(self, step: int, metrics: dict[str, float]) -> None:
        """The metrics of a finished step."""
        self._metrics.write(step, metrics)

    def close(self) -> None:
        """The run is over."""
        self._metrics.close()


class SilentRecorder:
    """What the other ranks have in its place."""

    def phase(self, step: int, name: str) -> None:
        """Nothing."""

    def record(self, step: int, metrics: dict[str, float]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class WatchedRecorder:
    """A recorder on whose phases the watchdog feeds, and behind which nothing is written any more
    by a run that was cut off from the cluster while another attempt took over."""

    def __init__(
        self,
        recorder: RunRecorder | SilentRecorder,
        watchdog: Watchdog,
        attempt: LaunchedAttempt | None,
    ) -> None:
        """`attempt`: of a launched run, on the rank that writes; None elsewhere."""
        self._recorder = recorder
        self._watchdog = watchdog
        self._attempt = attempt

    def phase(self, step: int, name: str) -> None:
        """As `RunRecorder.phase`. Raises Superseded where a later attempt owns the run."""
        self._watchdog.enter(step, name)
        self._require_current()
        self._recorder.phase(step, name)

    def record(self, step: int, metrics: dict[str, float]) -> None:
        """As `RunRecorder.record`. Raises Superseded where a later attempt owns the run."""
        self._require_current()
        self._recorder.record(step, metrics)

    def close(self) -> None:
        """The run is over."""
        self._recorder.close()

    def _require_current(self) -> None:
        if self._attempt is not None:
            self._attempt.require_current()
