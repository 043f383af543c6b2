"""How commands speak to people, and the exit codes they end with."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console

BAD_INPUT = 2
FAILED = 1
STOPPED = 130

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="section.key=value, once for each change.", show_default=False),
]
"""The option that every command with a configuration has."""


@contextmanager
def reported_errors() -> Iterator[None]:
    """Turns what a user can act on into one message and an exit code, without a traceback."""
    from megatron_credit.errors import FailedProcess

    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        yield
    except ValueError as error:
        errors.print(f"[bold red]error:[/] {escaped(error)}")
        raise typer.Exit(BAD_INPUT) from None
    except FailedProcess as error:
        errors.print(f"[bold red]failed:[/] {escaped(error)}")
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        errors.print("stopped; the same command goes on from what was written")
        raise typer.Exit(STOPPED) from None


def plain_console() -> Console:
    """Standard output, without colours where it is no terminal."""
    return Console(highlight=False, soft_wrap=True)


def escaped(text: object) -> str:
    """Text in which square brackets stay what they are."""
    from rich.markup import escape

    return escape(str(text))
