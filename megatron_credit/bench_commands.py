"""`megatron-credit bench ...`: speed and memory on this machine, and where credit falls."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from megatron_credit.console import STOPPED, Overrides, escaped, plain_console, reported_errors

bench = typer.Typer(no_args_is_help=True)

Names = list[str] | None


@bench.callback()
def root() -> None:
    """Measures speed and memory on this machine, and where credit falls."""


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


@bench.command()
def methods(
    output: Annotated[Path, typer.Argument(help="Directory of the runs, tables and pictures.")],
    configs: Annotated[
        list[Path],
        typer.Argument(help="Configurations to compare; the first one is the baseline."),
    ],
    seeds: Annotated[int, typer.Option(help="Runs of each configuration, from seed 1 on.")] = 5,
    overrides: Annotated[
        Names,
        typer.Option("--set", help="section.key=value in every one.", show_default=False),
    ] = None,
    jobs: Annotated[
        int, typer.Option(help="Series at once; step times mean something for 1 only.")
    ] = 1,
) -> None:
    """Trains every configuration with every seed and compares what they learn at equal steps.

    Runs that are complete are kept, so an interrupted comparison goes on. Writes methods.json,
    .csv, .md and .png.
    """
    console = plain_console()
    with reported_errors():
        from megatron_credit.trainer.contest.run import compare

        numbers = range(1, seeds + 1)
        paths = compare(
            configs, output, console, overrides=overrides or [], seeds=numbers, jobs=jobs
        )
    for path in paths:
        console.print(f"wrote {escaped(path)}")


@bench.command()
def credit(
    output: Annotated[Path, typer.Argument(help="Directory for rollouts, tables and picture.")],
    config: Annotated[
        Path, typer.Option(help="TOML file of a run whose task is chain_sum.")
    ] = Path("configs/bench/credit.toml"),
    overrides: Overrides = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Hugging Face directory or checkpoint of the policy; policy.model without it.",
            show_default=False,
        ),
    ] = None,
    rollouts: Annotated[
        Path | None,
        typer.Option(
            help="Recorded rollouts, such as those of an earlier benchmark; without it they are "
            "sampled into OUTPUT/rollouts, or found there.",
            show_default=False,
        ),
    ] = None,
    prompts: Annotated[
        int | None,
        typer.Option(
            min=1, help="To sample; trainer.prompts_per_step without it.", show_default=False
        ),
    ] = None,
    method: Annotated[
        Names,
        typer.Option(
            "--method", "--methods", help="Repeatable, or with commas; all of them without it."
        ),
    ] = None,
    reference_model: Annotated[
        Path | None,
        typer.Option(
            help="Hugging Face directory of the weights that read the evidence; without it as "
            "evidence.teacher says.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Measures how much of each method's credit falls on the first wrong step of wrong responses.

    The same rollouts of chain sums go through every method. Writes credit.json, .csv, .md and .png.
    """
    from megatron_credit.trainer.load_config import load_config

    console = plain_console()
    with reported_errors():
        changes = [*(overrides or [])]
        if prompts is not None:
            changes.append(f"trainer.prompts_per_step={prompts}")
        parsed = load_config(config, changes)
        from megatron_credit.trainer.localisation.run import Request, run_benchmark

        paths = run_benchmark(
            Request(
                config=parsed,
                output=output,
                model=model,
                rollouts=rollouts,
                methods=[name for names in method or [] for name in names.split(",")] or None,
                reference_model=reference_model,
            ),
            console,
        )
    for path in paths:
        console.print(f"wrote {escaped(path)}")
