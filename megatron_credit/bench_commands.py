"""`megatron-credit bench ...`: speed and memory on this machine."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from megatron_credit.console import STOPPED, escaped, plain_console, reported_errors

bench = typer.Typer(no_args_is_help=True)

Names = list[str] | None


@bench.callback()
def root() -> None:
    """Measures speed and memory on this machine."""


@bench.command()
def kernels(
    output: Annotated[Path, typer.Argument(help="Directory for the tables and pictures.")],
    head: Annotated[
        Names,
        typer.Option(
            help="qwen3-8b, or HIDDENxVOCABULARY; qwen3-8b/8 has an eighth of both. Repeatable; "
            "256x32000 on a CPU, every known model on a GPU without it.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(help="2048 on a CPU, 8192 on a GPU without it.", show_default=False),
    ] = None,
    tp: Annotated[
        list[int] | None,
        typer.Option(help="One rank's shard of so many. Repeatable; 1 without it."),
    ] = None,
    operation: Annotated[
        Names,
        typer.Option(help="For instance logprob_entropy. Repeatable; all of them without it."),
    ] = None,
    method: Annotated[
        Names,
        typer.Option(help="Beside eager, for instance liger. Repeatable; all without it."),
    ] = None,
    dtype: Annotated[
        Literal["fp32", "bf16"] | None,
        typer.Option(help="fp32 on a CPU, bf16 on a GPU without it.", show_default=False),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Passes of each method.")] = 5,
) -> None:
    """Times the fused kernels beside eager torch and others, after checking every method's values.

    Writes kernels.json, .csv and .md, speed.png and roofline.png. Runs on the GPU if there is one,
    else on one thread of this CPU.
    """
    with reported_errors():
        from credit_kernels.bench.errors import BenchmarkFailed
        from credit_kernels.bench.plan import make_plan
        from credit_kernels.bench.run import run

        from megatron_credit.errors import FailedProcess

        plan = make_plan(
            heads=head,
            tokens=tokens,
            ranks=tp,
            operations=operation,
            methods=method,
            dtype=dtype,
            repeats=repeats,
        )
        console = plain_console()
        try:
            paths = run(plan, output, tell=lambda line: console.print(line, markup=False))
        except BenchmarkFailed as error:
            raise FailedProcess(str(error)) from None
        except KeyboardInterrupt:
            console.print("stopped; the tables hold the problems that were finished")
            raise typer.Exit(STOPPED) from None
    for path in paths:
        console.print(f"wrote {escaped(path)}")
