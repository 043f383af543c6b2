"""The command line: `megatron-credit train` and `megatron-credit doctor`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

BAD_INPUT = 2
FAILED = 1

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def root() -> None:
    """Post-trains reasoning models with credit for the tokens that earned the reward."""


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="TOML file of the run, as in configs/.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="section.key=value, once for each change.", show_default=False),
    ] = None,
) -> None:
    """Trains on this machine; the same command again goes on from the newest checkpoint.

    Exit code 0: trained to the last step; 1: a process failed; 2: the input has to be changed.
    """
    from megatron_credit.trainer.load_config import ConfigError, load_config

    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        parsed = load_config(config, overrides or [])
    except ConfigError as error:
        errors.print(f"[bold red]error:[/] {escaped(error)}")
        raise typer.Exit(BAD_INPUT) from None
    from megatron_credit.rollouts.errors import EngineError
    from megatron_credit.trainer.local import TrainerError, run_locally

    console = Console(highlight=False, soft_wrap=True)
    try:
        directory = run_locally(parsed, console)
    except ValueError as error:
        errors.print(f"[bold red]error:[/] {escaped(error)}")
        raise typer.Exit(BAD_INPUT) from None
    except (EngineError, TrainerError) as error:
        errors.print(f"[bold red]failed:[/] {escaped(error)}")
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        errors.print("stopped; the same command goes on from the newest checkpoint")
        raise typer.Exit(130) from None
    console.print(f"trained to step {parsed.trainer.steps}")
    console.print(f"  curve   {directory.curve}")
    console.print(f"  metrics {directory.metrics}")
    console.print(f"  model   {directory.model}")


@app.command()
def doctor() -> None:
    """Shows what is installed, what is missing for which feature, and what to type."""
    from megatron_credit.doctor import examine

    console = Console(highlight=False, soft_wrap=True)
    complete = True
    for finding in examine():
        lack = "[red]missing[/]" if finding.required else "[yellow]absent[/] "
        mark = "[green]ok[/]     " if finding.fine else lack
        console.print(f"{mark} {finding.name:<22} {escaped(finding.found)}")
        if not finding.fine:
            console.print(f"        for {finding.purpose}: {escaped(finding.remedy)}")
        complete = complete and (finding.fine or not finding.required)
    raise typer.Exit(0 if complete else FAILED)


def escaped(text: object) -> str:
    """Text in which square brackets stay what they are."""
    from rich.markup import escape

    return escape(str(text))


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
