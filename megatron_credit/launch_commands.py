"""`megatron-credit launch`, `status`, `stop`, `logs`: runs over many nodes."""

import json
from pathlib import Path
from typing import Annotated

import typer

from megatron_credit.console import Overrides, plain_console, reported_errors

launch = typer.Typer(no_args_is_help=True)

Config = Annotated[Path, typer.Argument(help="TOML file of the run, as in configs/launch.")]
Run = Annotated[Path, typer.Argument(help="The run.directory of a launched run.")]
Nodes = Annotated[
    int | None,
    typer.Option(
        "--nodes",
        help="All nodes of the run, split between trainer and engines as the configuration's are; "
        "spares and services stay. With 1 the engines run beside the trainer.",
        show_default=False,
    ),
]


@launch.callback()
def root() -> None:
    """Runs over many nodes under Slurm, or the same on this machine."""


@launch.command("slurm")
def launch_slurm(
    config: Config,
    overrides: Overrides = None,
    nodes: Nodes = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write the script and show the layout; no more.")
    ] = False,
    test_only: Annotated[
        bool, typer.Option("--test-only", help="Ask Slurm whether it would take the job; no more.")
    ] = False,
) -> None:
    """Submits a run; it goes on by itself after time limits and faults until it is done."""
    from megatron_credit.trainer.load_config import load_config

    console = plain_console()
    with reported_errors():
        parsed = load_config(config, overrides or [])
        from megatron_credit.trainer.launching import start

        resolved, plan = start.prepare(parsed, nodes=nodes, on_slurm=True)
        if dry_run:
            start.dry_run(resolved, plan, console, on_slurm=True)
        elif test_only:
            start.test_only(resolved, plan, console)
        else:
            start.launch_on_slurm(resolved, plan, console)


@launch.command("local")
def launch_local(
    config: Config,
    overrides: Overrides = None,
    nodes: Nodes = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write the plan and show the layout; no more.")
    ] = False,
) -> None:
    """Runs the same plan on this machine, its nodes simulated by processes.

    Ctrl-C saves and ends; a second one ends at once.
    """
    from megatron_credit.trainer.load_config import load_config

    console = plain_console()
    with reported_errors():
        parsed = load_config(config, overrides or [])
        from megatron_credit.trainer.launching import start

        resolved, plan = start.prepare(parsed, nodes=nodes, on_slurm=False)
        if dry_run:
            start.dry_run(resolved, plan, console, on_slurm=False)
            return
        raise typer.Exit(start.launch_here(resolved, plan, console))


def status(
    run: Run,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Shows where a launched run stands."""
    from megatron_credit.trainer.launching.observe import status_lines, status_of

    console = plain_console()
    with reported_errors():
        found = status_of(run)
    lines = [json.dumps(found)] if as_json else status_lines(found)
    for line in lines:
        console.print(line, markup=False)


def stop(
    run: Run,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for a checkpoint.")] = False,
) -> None:
    """Ends a launched run after its present step; the same launch goes on from there."""
    from megatron_credit.trainer.launching.observe import stop_run

    with reported_errors():
        said = stop_run(run, now=now)
    plain_console().print(said, markup=False)


def logs(
    run: Run,
    task: Annotated[
        str | None, typer.Option(help="trainer, rollout-0, ...; all without it.")
    ] = None,
    node: Annotated[str | None, typer.Option(help="All without it.")] = None,
    attempt: Annotated[int | None, typer.Option(help="The newest without it.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Until the run is over.")] = False,
    lines: Annotated[int, typer.Option(min=0, help="From the end of each log.")] = 20,
) -> None:
    """Shows what the tasks of a launched run said."""
    from megatron_credit.trainer.launching import observe

    console = plain_console()
    with reported_errors():
        query = observe.LogQuery(task, node, attempt)
        for path in observe.find_logs(run, query):
            console.print(f"==> {path}", markup=False)
            for line in observe.last_lines(path, lines):
                console.print(line, markup=False)
        if follow:
            for path, line in observe.follow_logs(run, query):
                console.print(f"{path.stem} | {line}", markup=False)
