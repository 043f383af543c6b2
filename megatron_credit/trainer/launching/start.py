"""`launch slurm` and `launch local`: checks, files, then the job or the processes."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from credit_launch.files import publish
from credit_launch.journal import write_state
from credit_launch.main import run_here
from credit_launch.plan import ROLLOUT, Plan
from rich.console import Console

from megatron_credit.errors import FailedProcess
from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.follow import print_new_lines
from megatron_credit.trainer.launching import site
from megatron_credit.trainer.launching.build import build_plan, resolve
from megatron_credit.trainer.launching.key import ensure_key
from megatron_credit.trainer.launching.refusals import check_launch
from megatron_credit.trainer.launching.show import show_launch, show_next
from megatron_credit.trainer.launching.write import (
    clear_marks,
    next_attempt,
    write_files,
    write_scripts,
)
from megatron_credit.trainer.metrics import read_metrics
from megatron_credit.trainer.run_directory import RunDirectory

SHOW_S = 0.5


def prepare(config: RunConfig, *, nodes: int | None, on_slurm: bool) -> tuple[RunConfig, Plan]:
    """The resolved configuration and its plan; ValueError where it cannot work."""
    config = resolve(config, nodes)
    plan = build_plan(config, first_attempt=next_attempt(config.run.directory))
    check_launch(config, plan, on_slurm=on_slurm)
    return config, plan


def dry_run(config: RunConfig, plan: Plan, console: Console, *, on_slurm: bool) -> None:
    """Writes what would be submitted or started, and shows it."""
    files = write_files(config, plan)
    scripts = write_scripts(files, plan) if on_slurm else []
    show_launch(config, plan, console)
    console.print("\n[bold]Files[/]")
    for path in (*scripts, files.plan, files.config):
        console.print(f"  {path}", markup=False)
    console.print("nothing was submitted" if on_slurm else "nothing was started")


def test_only(config: RunConfig, plan: Plan, console: Console) -> None:
    """Asks Slurm whether and when the job could start."""
    site.require_slurm()
    files = write_files(config, plan)
    for script in write_scripts(files, plan):
        console.print(site.test_submission(script), markup=False)
    console.print("nothing was submitted")


def launch_on_slurm(config: RunConfig, plan: Plan, console: Console) -> None:
    """Submits the run. ValueError before that for what the user can correct."""
    site.require_slurm()
    config = check_contents(config, console)
    ensure_key(Path(plan.key_file))
    files = write_files(config, plan)
    scripts = write_scripts(files, plan)
    for script in scripts:
        site.test_submission(script)
    clear_marks(files)
    write_state(files, "submitted")
    job = site.submit(files.script)
    rollout_job = None
    if files.rollout_script in scripts:
        try:
            rollout_job = site.submit(files.rollout_script, [f"--dependency=after:{job}"])
        except (ValueError, FailedProcess):
            site.cancel(job)
            raise
    record = {"job": job, "rollout_job": rollout_job, "submitted": time.time()}
    publish(files.job, json.dumps(record) + "\n")
    engines = f", engines {rollout_job} ({ROLLOUT} array)" if rollout_job else ""
    console.print(f"job {job}{engines} on {plan.total_nodes} nodes")
    show_next(config.run.directory, console)


def launch_here(config: RunConfig, plan: Plan, console: Console) -> int:
    """Runs the same plan on this machine's processes until it ends; the exit code."""
    config = check_contents(config, console)
    ensure_key(Path(plan.key_file))
    files = write_files(config, plan)
    clear_marks(files)
    show_next(config.run.directory, console)
    with shown_steps(RunDirectory(config.run.directory), console):
        ending = run_here(plan)
    if ending.state == "gave-up":
        raise FailedProcess(ending.why)
    if ending.state == "done":
        console.print(f"done; see {files.run}", markup=False)
    return ending.code


@contextmanager
def shown_steps(directory: RunDirectory, console: Console) -> Iterator[None]:
    """Meanwhile each step of the trainer is a line on the console."""
    shown, is_over = len(read_metrics(directory.metrics)), threading.Event()

    def show() -> None:
        nonlocal shown
        while not is_over.wait(SHOW_S):
            shown = print_new_lines(directory, console, shown)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        print_new_lines(directory, console, shown)


def check_contents(config: RunConfig, console: Console) -> RunConfig:
    """The configuration with what follows from model and data filled in; ValueError as `train`
    raises it. What only the image holds is checked by the first node."""
    from megatron_credit.trainer.check_credit import check_credit

    if config.launch.container.kind != "none":
        check_credit(config)
        return config
    from megatron_credit.trainer.checks import check_run
    from megatron_credit.trainer.start import find_start

    checked = check_run(config)
    directory = RunDirectory(config.run.directory)
    start = find_start(checked.config, directory, questions=checked.questions)
    for remark in (*checked.remarks, *start.remarks):
        console.print(remark, markup=False)
    return checked.config
