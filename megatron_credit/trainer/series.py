"""Several runs one after the other in the same processes, with one engine: nothing starts twice."""

import os
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack

from rich.console import Console

from megatron_credit.trainer.checks import CheckedRun
from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.local import (
    rollouts_from,
    start_engine,
    start_trainer,
    stop_engine,
    stop_process,
    watcher,
)
from megatron_credit.trainer.metrics import read_metrics
from megatron_credit.trainer.run_directory import RunDirectory
from megatron_credit.trainer.start import Start, prepare

POLL_S = 0.5


def run_series(runs: Sequence[CheckedRun], console: Console) -> None:
    """Trains every run from fresh weights to its last step.

    ValueError where they do not share what the engine and the ranks are made of; EngineError and
    TrainerError for processes that died. What a run directory held before is deleted.
    """
    configs = with_one_engine([run.config for run in runs])
    directories = [RunDirectory(config.run.directory) for config in configs]
    with ExitStack() as stack:
        locks = []
        for run, config, directory in zip(runs, configs, directories, strict=True):
            shutil.rmtree(directory.root, ignore_errors=True)
            locks.append(stack.enter_context(prepare(config, directory, Start())))
            directory.write_data(run.questions)
        first = directories[0]
        server = start_engine(configs[0], first)
        stack.callback(stop_engine, server)
        trainer = start_trainer(
            configs[0],
            directories,
            None,
            rollouts_from(configs[0], server, None),
            server=server,
            inherited=[lock.fileno() for lock in locks],
        )
        stack.callback(stop_process, trainer)
        goes_on = watcher(trainer, server, first, configs[0].num_processes)
        waiting = list(zip(configs, directories, strict=True))
        while goes_on():
            waiting = tell_finished(waiting, console)
            time.sleep(POLL_S)
        tell_finished(waiting, console)


def with_one_engine(configs: Sequence[RunConfig]) -> list[RunConfig]:
    """The runs with one engine that has room for the longest of their contexts."""
    first = configs[0]
    for config in configs[1:]:
        for name in ("policy", "parallel"):
            if vars(config)[name] != vars(first)[name]:
                raise ValueError(
                    f"[{name}] of {config.run.directory} differs from that of "
                    f"{first.run.directory}; runs that share an engine need the same"
                )
    longest = max(config.engine.max_model_len or 0 for config in configs)
    engine = first.engine.model_copy(update={"max_model_len": longest})
    return [config.model_copy(update={"engine": engine}) for config in configs]


def tell_finished(
    waiting: Sequence[tuple[RunConfig, RunDirectory]], console: Console
) -> list[tuple[RunConfig, RunDirectory]]:
    """Says which runs are over; those that are not."""
    left = []
    for config, directory in waiting:
        if not is_complete(config, directory):
            left.append((config, directory))
            continue
        last = read_metrics(directory.metrics)[-1]
        shown = {name: last[name] for name in ("reward/mean", "eval/accuracy") if name in last}
        figures = ", ".join(f"{name} {value:.3f}" for name, value in shown.items())
        place = os.path.relpath(directory.root)
        console.print(f"{place}: {config.trainer.steps} steps, {figures}", markup=False)
    return left


def is_complete(config: RunConfig, directory: RunDirectory) -> bool:
    """Whether the run has the metrics of its last step."""
    records = read_metrics(directory.metrics)
    return bool(records) and records[-1]["step"] == config.trainer.steps
