"""Metrics and progress of a run, written by rank 0."""

import time

from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.loggers import open_loggers
from megatron_credit.trainer.metrics import MetricsLog
from megatron_credit.trainer.run_directory import RunDirectory


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
