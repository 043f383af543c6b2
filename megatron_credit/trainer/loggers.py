"""Copies of a run's metrics for TensorBoard, Weights & Biases and MLflow; metrics.jsonl is the
original.

A service that cannot be reached does not stop a run: its logger says so once, in the log of rank 0,
and the number of records that it missed at the end.
"""

import importlib.util
import json
import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from pydantic import Field

from megatron_credit.settings import Settings

log = logging.getLogger(__name__)


class WandbConfig(Settings):
    """Weights & Biases; the key comes from WANDB_API_KEY or `wandb login`."""

    project: str = Field(min_length=1)
    """Project that the run appears in."""
    entity: str | None = None
    """Team or user; unset: the default of the key."""
    mode: str = Field("online", pattern="^(online|offline)$")
    """offline: files below the run directory, for `wandb sync` later."""


class MlflowConfig(Settings):
    """MLflow; credentials come from its own environment variables."""

    tracking_uri: str = Field(min_length=1)
    """Address of the tracking server, such as http://host:5000."""
    experiment: str = "megatron-credit"
    """Experiment that the run appears in; made where there is none."""


class LoggersSection(Settings):
    """Where metrics go besides metrics.jsonl."""

    tensorboard: bool = True
    """Event files in the run directory's `tensorboard`."""
    wandb: WandbConfig | None = None
    """Needs the extra: pip install 'megatron-credit[wandb]'."""
    mlflow: MlflowConfig | None = None
    """Needs the extra: pip install 'megatron-credit[mlflow]'."""


class Logger(Protocol):
    """Takes the metrics of a step."""

    def write(self, step: int, values: dict[str, float]) -> None:
        """Records the values of one step."""
        ...

    def close(self) -> None:
        """Hands over what is still held."""
        ...


def check_loggers(config: LoggersSection) -> None:
    """ValueError where a logger is asked for whose package is not installed."""
    for name, wanted in (("wandb", config.wandb), ("mlflow", config.mlflow)):
        if wanted is not None and importlib.util.find_spec(name) is None:
            raise ValueError(
                f"loggers.{name} needs the package {name}; pip install 'megatron-credit[{name}]', "
                "or leave the section out"
            )


def open_loggers(
    config: LoggersSection, root: Path, *, settings: dict[str, Any], last_step: int
) -> list[Logger]:
    """The loggers of the run in `root`, going on after `last_step`; `settings` is what they show
    as the configuration of the run."""
    loggers: list[Logger] = []
    if config.tensorboard:
        loggers.append(TensorBoardLogger(root / "tensorboard", last_step=last_step))
    if config.wandb is not None:
        loggers.append(WandbLogger(config.wandb, root, settings))
    if config.mlflow is not None:
        loggers.append(MlflowLogger(config.mlflow, root, settings))
    return loggers


class TensorBoardLogger:
    """Event files; records that a resumed run repeats are purged."""

    def __init__(self, directory: Path, *, last_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._board = SummaryWriter(str(directory), purge_step=last_step + 1)

    def write(self, step: int, values: dict[str, float]) -> None:
        """A scalar a metric."""
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Flushes the files."""
        self._board.close()


class WandbLogger:
    """A Weights & Biases run that a resumed run goes on with.

    The service keeps what it has of a step that is repeated; a repeated step has the same values.
    """

    def __init__(self, config: WandbConfig, root: Path, settings: dict[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            mode=config.mode,
            dir=str(root),
            name=root.name,
            id=remembered(root / "wandb.json", lambda: secrets.token_hex(8)),
            resume="allow",
            config=settings,
            settings=wandb.Settings(console="off"),
        )

    def write(self, step: int, values: dict[str, float]) -> None:
        """Hands the values to wandb's own process, which retries while the service is away."""
        self._run.log(values, step=step)

    def close(self) -> None:
        """Waits until wandb has written or sent everything."""
        self._run.finish()


class MlflowLogger:
    """An MLflow run that a resumed run goes on with."""

    def __init__(self, config: MlflowConfig, root: Path, settings: dict[str, Any]) -> None:
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self._failure = MlflowException
        self._lost = 0
        self._client = MlflowClient(tracking_uri=config.tracking_uri)
        self._run = remembered(root / "mlflow.json", lambda: self._create(config, root, settings))

    def _create(self, config: MlflowConfig, root: Path, settings: dict[str, Any]) -> str:
        experiment = self._client.get_experiment_by_name(config.experiment)
        number = (
            self._client.create_experiment(config.experiment)
            if experiment is None
            else experiment.experiment_id
        )
        run = self._client.create_run(number, run_name=root.name).info.run_id
        self._client.log_dict(run, settings, "config.json")
        return run

    def write(self, step: int, values: dict[str, float]) -> None:
        """One request; a step that the server did not take is lost to it, and is counted."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        try:
            self._client.log_batch(self._run, metrics=metrics)
        except self._failure as error:
            if not self._lost:
                log.warning("MLflow did not take step %d: %s", step, error)
            self._lost += 1

    def close(self) -> None:
        """Marks the run as finished."""
        if self._lost:
            log.warning("MLflow lacks %d steps; metrics.jsonl has them", self._lost)
        try:
            self._client.set_terminated(self._run)
        except self._failure as error:
            log.warning("MLflow did not take the end of the run: %s", error)


def remembered(path: Path, create: Callable[[], str]) -> str:
    """The id in the file; made by `create` and written where there is none yet."""
    if path.is_file():
        return json.loads(path.read_text())["id"]
    made = create()
    path.write_text(json.dumps({"id": made}))
    return made
