"""`bench credit`: samples, gives credit by every method, measures where it falls, reports."""

import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from megatron_credit.mcore.architecture import read_architecture
from megatron_credit.mcore.config import TeacherConfig
from megatron_credit.mcore.manifest import read_manifest
from megatron_credit.tasks.chain_sum import ChainSumConfig
from megatron_credit.trainer.checks import load_tokenizer
from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.engine_run import Weights, find_weights
from megatron_credit.trainer.local import (
    TrainerError,
    describe_exit,
    failed_log,
    start_ranks,
    stop_process,
)
from megatron_credit.trainer.localisation.culprits import Case, Groups, find_cases
from megatron_credit.trainer.localisation.plan import CreditPlan, Pass
from megatron_credit.trainer.localisation.record import (
    FORMS,
    Record,
    given_records,
    sample_record,
)
from megatron_credit.trainer.localisation.report import Report, write_report
from megatron_credit.trainer.localisation.results import describe_record, measure_row
from megatron_credit.trainer.localisation.rows import Form, Refusal, Row, plan_rows, with_reference
from megatron_credit.trainer.run_directory import RunDirectory, lock_directory
from megatron_credit.trainer.start import checkpoint_identity
from megatron_credit.trainer.worker_environment import worker_environment

POLL_S = 0.2
Cases = dict[Form, dict[Groups, list[Case]]]


@dataclass(frozen=True)
class Request:
    """What was asked for."""

    config: RunConfig
    output: Path
    model: str | None = None
    """Weights of the policy; None: those of policy.model."""
    rollouts: Path | None = None
    """Recorded ones; None: they are sampled into the output."""
    methods: Sequence[str] | None = None
    """None: all."""
    reference_model: Path | None = None
    """Weights that read the evidence; None: as evidence.teacher says."""


def run_benchmark(request: Request, console: Console) -> list[Path]:
    """The files that it has written to the output directory.

    Raises ValueError, before anything is started, for what the user can correct, EngineError and
    TrainerError for processes that died.
    """
    config, weights = settle(request)
    average = average_of(config, weights)
    rows, refused = plan_rows(
        config,
        request.methods,
        has_average=weights.checkpoint is None or average is not None,
    )
    try:
        request.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{request.output} cannot be a directory ({error.strerror}); name another place"
        ) from None
    with lock_directory(request.output, otherwise="name another directory"):
        records = find_records(request, config, rows, console)
        refused += [
            Refusal(row.label, f"the record has no answers in {row.form}")
            for row in rows
            if row.form not in records
        ]
        rows = [row for row in rows if row.form in records]
        tokenizer = load_tokenizer(config.policy.model)
        cases = find_all_cases(records, tokenizer)
        rows = with_cases(rows, refused, cases)
        plan = make_plan(request, weights, average, rows, records)
        started = time.monotonic()
        work(plan, config, console)
        console.print(f"gave credit in {time.monotonic() - started:.0f} s")
        results = [
            measure_row(row, cases[row.form][row.groups], plan.credited(row.name), config.run.seed)
            for row in rows
        ]
    report = Report(
        weights=str(weights.path),
        settings=config,
        records=[describe_record(form, record, cases[form]) for form, record in records.items()],
        results=results,
        refused=refused,
    )
    return write_report(request.output, report, console)


def settle(request: Request) -> tuple[RunConfig, Weights]:
    """The configuration of one step with this model, and its weights."""
    config = request.config
    if not isinstance(config.task, ChainSumConfig):
        raise ValueError(
            'the first wrong step is known for [task] kind = "chain_sum" only; use it, as in '
            "configs/bench/credit.toml"
        )
    if config.attempts is not None:
        raise ValueError("the benchmark reads single attempts; leave [attempts] out")
    weights = find_weights(config, request.model)
    if request.reference_model is not None:
        read_architecture(request.reference_model)
        config = with_reference(config, request.reference_model)
    policy = config.policy.model_copy(update={"model": weights.model})
    sizes = config.trainer.model_copy(update={"updates_per_step": 1})
    return config.model_copy(update={"policy": policy, "trainer": sizes}), weights


def average_of(config: RunConfig, weights: Weights) -> TeacherConfig | None:
    """The moving average that a checkpoint holds; ValueError for one of another kind of run."""
    if weights.checkpoint is None:
        return None
    holds_one = read_manifest(weights.checkpoint, {})["identity"].get("teacher") == "ema"
    read_manifest(weights.checkpoint, checkpoint_identity(config, has_average=holds_one))
    return TeacherConfig(kind="ema") if holds_one else None


def find_records(
    request: Request, config: RunConfig, rows: Sequence[Row], console: Console
) -> dict[Form, Record]:
    """The rollouts of each form that a row needs."""
    wanted: list[Form] = [form for form in FORMS if any(row.form == form for row in rows)]
    if request.rollouts is not None:
        found = given_records(config, request.rollouts, wanted)
        return {form: record for form, record in found.items() if form in wanted}
    return {
        form: sample_record(
            config, form, request.output / "rollouts", console, weights=request.model
        )
        for form in wanted
    }


def find_all_cases(records: dict[Form, Record], tokenizer: PreTrainedTokenizerBase) -> Cases:
    """The responses that count, of every record."""
    return {form: find_cases(record.groups, tokenizer) for form, record in records.items()}


def with_cases(rows: Sequence[Row], refused: list[Refusal], cases: Cases) -> list[Row]:
    """The rows that something can be measured for; ValueError where there is none."""
    kept = []
    for row in rows:
        if cases[row.form][row.groups]:
            kept.append(row)
        else:
            kind = "mixed" if row.groups == "mixed" else "all-wrong"
            refused.append(
                Refusal(row.label, f"the record has no wrong step in a {kind} group of {row.form}")
            )
    if not kept:
        raise ValueError(
            "no rollout of the record has a wrong step where these methods give credit: "
            "sample more prompts or harder ones (--prompts, task.max_terms)"
        )
    return kept


def make_plan(
    request: Request,
    weights: Weights,
    average: TeacherConfig | None,
    rows: Sequence[Row],
    records: dict[Form, Record],
) -> CreditPlan:
    """What the worker has to do."""
    used = {row.form for row in rows}
    return CreditPlan(
        directory=request.output.absolute(),
        checkpoint=weights.checkpoint,
        average=average,
        records={form: record.path for form, record in records.items() if form in used},
        passes=tuple(Pass(name=row.name, record=row.form, config=row.config) for row in rows),
    )


def work(plan: CreditPlan, config: RunConfig, console: Console) -> None:
    """Runs the worker's ranks to their end; TrainerError where they fail, with the log's end."""
    directory = RunDirectory(plan.directory)
    for path in (plan.logs, plan.credited("any").parent):
        path.mkdir(exist_ok=True)
    for path in [*plan.logs.glob("*.log"), *map(plan.credited, (one.name for one in plan.passes))]:
        path.unlink(missing_ok=True)
    path = plan.directory / "plan.json"
    path.write_text(plan.model_dump_json(indent=2))
    worker = start_ranks(
        ["megatron_credit.trainer.localisation.worker", str(path)],
        config.num_processes,
        log=plan.logs / "torchrun.log",
        environment=worker_environment(),
    )
    try:
        follow(worker, plan, lambda text: console.print(text, markup=False))
    finally:
        stop_process(worker)
    if worker.returncode:
        raise TrainerError(
            f"the worker {describe_exit(worker.returncode)}\n"
            f"{failed_log(directory, config.num_processes)}"
        )


def follow(worker: subprocess.Popen, plan: CreditPlan, tell: Callable[[str], None]) -> None:
    """Says which methods are done until the worker has ended."""
    left = [one.name for one in plan.passes]
    while left or worker.poll() is None:
        ended = worker.poll() is not None
        while left and plan.credited(left[0]).exists():
            tell(f"gave credit: {left.pop(0)}")
        if ended:
            return
        with suppress(subprocess.TimeoutExpired):
            worker.wait(POLL_S)
