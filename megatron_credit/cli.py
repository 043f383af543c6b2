"""The command line: `megatron-credit COMMAND --help` says what each command does."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from megatron_credit.bench_commands import bench
from megatron_credit.console import (
    BAD_INPUT,
    FAILED,
    Overrides,
    escaped,
    plain_console,
    reported_errors,
)
from megatron_credit.launch_commands import launch, logs, status, stop


class RecordFormat(StrEnum):
    """How rollout records are written."""

    JSONL = "jsonl"
    PARQUET = "parquet"


app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
convert = typer.Typer(no_args_is_help=True)
app.add_typer(convert, name="convert", help="Between Hugging Face models and checkpoints.")
app.add_typer(launch, name="launch", help="Runs over many nodes, under Slurm or here.")
app.add_typer(bench, name="bench", help="Measures speed and memory on this machine.")

Config = Annotated[Path, typer.Argument(help="TOML file of the run, as in configs/.")]


@app.callback()
def root() -> None:
    """Post-trains reasoning models with credit for the tokens that earned the reward.

    Exit codes: 0 done; 1 a process failed; 2 the input has to be changed.
    """


Weights = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Hugging Face directory or checkpoint to sample from; policy.model without it.",
        show_default=False,
    ),
]


@app.command()
def train(
    config: Config,
    overrides: Overrides = None,
    load_rollouts: Annotated[
        Path | None,
        typer.Option(
            help="Train on recorded rollouts, a directory or a file, without an engine.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done; start and write nothing.")
    ] = False,
) -> None:
    """Trains on this machine; the same command again goes on from the newest checkpoint."""
    from megatron_credit.trainer.load_config import load_config

    console = plain_console()
    with reported_errors():
        parsed = load_config(config, overrides or [])
        if dry_run:
            from megatron_credit.trainer.plan_run import show_plan

            show_plan(parsed, console, record=load_rollouts)
            return
        from megatron_credit.trainer.local import run_locally

        directory = run_locally(parsed, console, record=load_rollouts)
    console.print(f"trained to step {parsed.trainer.steps}")
    console.print(f"  curve   {directory.curve}")
    console.print(f"  metrics {directory.metrics}")
    console.print(f"  model   {directory.model}")


app.command()(status)
app.command()(stop)
app.command()(logs)


@app.command()
def rollout(
    config: Config,
    overrides: Overrides = None,
    steps: Annotated[
        str | None,
        typer.Option(help="3 or 3-7; all steps of the run without it.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Directory; sampled/ in run.directory without it.", show_default=False),
    ] = None,
    model: Weights = None,
    form: Annotated[
        RecordFormat, typer.Option("--format", help="Of the files that are written.")
    ] = RecordFormat.JSONL,
) -> None:
    """Samples the rollouts that training would sample for these steps; no trainer is started."""
    from megatron_credit.trainer.load_config import load_config

    with reported_errors():
        parsed = load_config(config, overrides or [])
        from megatron_credit.trainer.record_rollouts import parse_steps, record_rollouts

        record_rollouts(
            parsed,
            plain_console(),
            steps=parse_steps(steps, last=parsed.trainer.steps),
            output=output or parsed.run.directory / "sampled",
            weights=model,
            suffix=f".{form.value}",
        )


@app.command("eval")
def evaluate(
    config: Config,
    overrides: Overrides = None,
    model: Weights = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(help="As --model: step-000010 of the run.", show_default=False),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="Answers to each prompt; 8 without it.", show_default=False)
    ] = None,
    k: Annotated[
        str | None,
        typer.Option(help="pass@k and maj@k of these; 1,2,4,8 without it.", show_default=False),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="0: greedy; sampling.temperature without it.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="JSON file; in eval/ of run.directory without it.", show_default=False),
    ] = None,
) -> None:
    """Grades answers to the held-out prompts: pass@k, majority vote, lengths, each dataset."""
    from megatron_credit.trainer.load_config import load_config

    console = plain_console()
    with reported_errors():
        parsed = load_config(config, overrides or [])
        from megatron_credit.trainer.evaluate import evaluate, make_plan

        if model is not None and checkpoint is not None:
            raise ValueError("--model and --checkpoint both name weights; give one of them")
        plan = make_plan(parsed, samples=samples, ks=k, temperature=temperature)
        path = evaluate(parsed, console, plan=plan, weights=model or checkpoint, output=output)
    console.print(f"  estimates {path}", markup=False)
    console.print(f"  answers   {path.with_suffix('.jsonl')}", markup=False)


@app.command()
def validate(
    config: Config,
    overrides: Overrides = None,
    parallel: Annotated[
        bool,
        typer.Option("--parallel", help="Compare the layout's loss and gradients with one rank's."),
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="With --parallel: the model itself, not a small twin.")
    ] = False,
) -> None:
    """Checks a configuration, its data, its model and the memory; all problems at once."""
    from megatron_credit.trainer.load_config import load_config

    console = plain_console()
    with reported_errors():
        parsed = load_config(config, overrides or [])
        if full and not parallel:
            raise ValueError("--full says what --parallel compares; add --parallel")
        if parallel:
            from megatron_credit.trainer.check_layout import check_layout

            raise typer.Exit(0 if check_layout(parsed, console, full=full) else FAILED)
        from megatron_credit.trainer.validate import examine, show

        checklist = examine(parsed)
    show(checklist, console)
    raise typer.Exit(0 if checklist.fine else BAD_INPUT)


@convert.command("hf-to-mcore")
def hf_to_mcore(
    model: Annotated[Path, typer.Argument(help="Hugging Face model directory.")],
    output: Annotated[Path, typer.Argument(help="step-000000 is made in this directory.")],
    dtype: Annotated[
        Literal["auto", "fp32", "bf16"], typer.Option(help="auto is that of the files.")
    ] = "auto",
    optimizer: Annotated[
        Literal["adam", "sgd"], typer.Option(help="optimizer.kind of the run.")
    ] = "adam",
) -> None:
    """A Hugging Face model becomes a checkpoint that run.resume can name."""
    from megatron_credit.mcore.conversion import hf_to_checkpoint

    with reported_errors():
        checkpoint = hf_to_checkpoint(model, output, dtype=dtype, optimizer=optimizer)
    plain_console().print(f"wrote {escaped(checkpoint)}")


@convert.command("mcore-to-hf")
def mcore_to_hf(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint of any layout: .../step-000010.")],
    output: Annotated[Path, typer.Argument(help="Directory to make.")],
    model: Annotated[Path, typer.Option(help="Hugging Face directory that the run started from.")],
    dtype: Annotated[
        Literal["auto", "fp32", "bf16", "fp16"],
        typer.Option(help="auto is that of each tensor in --model."),
    ] = "auto",
) -> None:
    """A checkpoint's weights become a Hugging Face model."""
    from megatron_credit.mcore.conversion import checkpoint_to_hf

    with reported_errors():
        checkpoint_to_hf(checkpoint, model, output, dtype=dtype)
    plain_console().print(f"wrote {escaped(output)}")


@app.command()
def inspect(
    run: Annotated[Path, typer.Argument(help="The run.directory of a run.")],
    output: Annotated[
        Path | None,
        typer.Option(help="HTML file; inspect.html in RUN without it.", show_default=False),
    ] = None,
    max_rollouts: Annotated[
        int, typer.Option(help="Of a larger run the page holds groups of each step.")
    ] = 10_000,
) -> None:
    """Writes one HTML page with the curves, the rollouts and the credit of their tokens."""
    from megatron_credit.report.page.write import write_page

    with reported_errors():
        page = write_page(run, output, max_rollouts=max_rollouts)
    plain_console().print(f"wrote {escaped(page)}")


@app.command()
def doctor() -> None:
    """Shows what is installed, what is missing for which feature, and what to type."""
    from megatron_credit.doctor import examine

    console = plain_console()
    complete = True
    for finding in examine():
        lack = "[red]missing[/]" if finding.required else "[yellow]absent[/] "
        mark = "[green]ok[/]     " if finding.fine else lack
        console.print(f"{mark} {finding.name:<22} {escaped(finding.found)}")
        if not finding.fine:
            console.print(f"        for {finding.purpose}: {escaped(finding.remedy)}")
        complete = complete and (finding.fine or not finding.required)
    raise typer.Exit(0 if complete else FAILED)


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
