"""Metrics in the services' own formats, read back with the services' own readers."""

import json
import math

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_credit.trainer import loggers
from megatron_credit.trainer.loggers import (
    LoggersSection,
    MlflowConfig,
    WandbConfig,
    check_loggers,
    open_loggers,
)
from megatron_credit.trainer.metrics import MetricsLog, read_metrics

STEPS = {1: {"reward/mean": 0.25, "lr": 1e-6}, 2: {"reward/mean": 0.5, "lr": 2e-6}}


def write_run(config, root, *, last_step):
    root.mkdir(exist_ok=True)
    opened = open_loggers(config, root, settings={"run": {"seed": 1}}, last_step=last_step)
    log = MetricsLog(root / "metrics.jsonl", opened, last_step=last_step)
    for step, values in STEPS.items():
        if step > last_step:
            log.write(step, values)
    log.close()


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path):
    write_run(LoggersSection(), tmp_path / "run", last_step=0)
    write_run(LoggersSection(), tmp_path / "run", last_step=1)
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in board.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]


def test_mlflow_run_goes_on_after_a_resume(tmp_path, monkeypatch):
    tracking = pytest.importorskip("mlflow.tracking", reason="pip install mlflow-skinny")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a server stores in a database
    address = f"file://{tmp_path}/store"
    config = LoggersSection(tensorboard=False, mlflow=MlflowConfig(tracking_uri=address))
    write_run(config, tmp_path / "run", last_step=0)
    write_run(config, tmp_path / "run", last_step=2)
    client = tracking.MlflowClient(tracking_uri=address)
    experiment = client.get_experiment_by_name("megatron-credit")
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert sorted((point.step, point.value) for point in history) == [(1, 0.25), (2, 0.5)]
    assert run.info.run_name == "run"
    assert run.info.status == "FINISHED"


def test_mlflow_that_takes_nothing_costs_no_metrics(tmp_path, monkeypatch, caplog):
    tracking = pytest.importorskip("mlflow.tracking", reason="pip install mlflow-skinny")
    exceptions = pytest.importorskip("mlflow.exceptions", reason="pip install mlflow-skinny")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")

    def refuse(*_args, **_options):
        raise exceptions.MlflowException("the server is away")

    monkeypatch.setattr(tracking.MlflowClient, "log_batch", refuse)
    config = MlflowConfig(tracking_uri=f"file://{tmp_path}/store")
    write_run(LoggersSection(mlflow=config), tmp_path / "run", last_step=0)
    assert [r["reward/mean"] for r in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [
        0.25,
        0.5,
    ]
    assert "did not take step 1: the server is away" in caplog.text
    assert "MLflow lacks 2 steps" in caplog.text


def test_wandb_offline_keeps_one_run_id(tmp_path):
    pytest.importorskip("wandb", reason="pip install wandb")
    config = LoggersSection(tensorboard=False, wandb=WandbConfig(project="p", mode="offline"))
    write_run(config, tmp_path / "run", last_step=0)
    first = json.loads((tmp_path / "run" / "wandb.json").read_text())["id"]
    write_run(config, tmp_path / "run", last_step=1)
    assert json.loads((tmp_path / "run" / "wandb.json").read_text())["id"] == first
    files = sorted((tmp_path / "run" / "wandb").glob(f"offline-run-*/run-{first}.wandb"))
    assert files
    assert b"reward/mean" in files[0].read_bytes()


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_logger_without_its_package_is_refused(name, monkeypatch):
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda _name: None)
    wanted = {"wandb": {"project": "p"}, "mlflow": {"tracking_uri": "http://host:5000"}}[name]
    with pytest.raises(ValueError, match=rf"pip install 'megatron-credit\[{name}\]'"):
        check_loggers(LoggersSection.model_validate({name: wanted}))


def test_nan_is_null_on_disk_and_nan_again_when_read(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", [], last_step=0)
    log.write(1, {"loss": math.nan})
    log.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": null}\n'
    assert math.isnan(read_metrics(tmp_path / "metrics.jsonl")[0]["loss"])
