"""A run on recorded rollouts, before anything is started: what must fit, and what is left out."""

from pathlib import Path

from megatron_credit.mcore.architecture import Architecture, check_parallel, read_architecture
from megatron_credit.trainer.check_credit import check_credit, check_records
from megatron_credit.trainer.checks import CheckedRun, check_weights_exist
from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.loggers import check_loggers
from megatron_credit.trainer.recorded_steps import Limits, recorded_steps
from megatron_credit.trainer.rollout_meta import check_loadable, describe_sampling, read_meta
from megatron_credit.trainer.run_directory import RunDirectory

UNKNOWN_QUESTIONS = "unknown: recorded rollouts without meta.json"


def check_loaded_run(config: RunConfig, record: Path) -> CheckedRun:
    """As `check_run`, for a run on recorded rollouts: no engine and no data are needed.

    ValueError where the model, the method or the record's meta.json do not fit; the rollouts
    themselves are checked by `check_record`.
    """
    check_credit(config)
    check_loggers(config.loggers)
    architecture = read_architecture(config.policy.model, config.policy.converter)
    check_parallel(architecture, config.parallel, config.num_processes)
    if not config.policy.random_weights:
        check_weights_exist(config.policy.model)
    check_other_place(config, record)
    meta = read_meta(record)
    questions = UNKNOWN_QUESTIONS if meta is None else meta.questions
    if meta is not None:
        expected = describe_sampling(config, questions=questions, weights=meta.weights)
        check_loadable(record, meta, expected)
    evaluation = config.evaluation.model_copy(update={"every": 0})
    report = {"summary": [f"recorded rollouts in {record}"]}
    return CheckedRun(
        config.model_copy(update={"evaluation": evaluation}),
        {"fingerprint": questions, "report": report},
    )


def check_other_place(config: RunConfig, record: Path) -> None:
    """ValueError where the run would write over the rollouts that it reads."""
    own = RunDirectory(config.run.directory).rollouts.resolve()
    if own in (record.resolve(), record.resolve().parent):
        raise ValueError(
            f"{record} belongs to run.directory={config.run.directory}, which would be written "
            "over; set run.directory to a new one"
        )


def check_record(config: RunConfig, record: Path, *, first: int) -> None:
    """Reads the rollouts of all steps from `first` on; ValueError where one does not fit."""
    architecture = read_architecture(config.policy.model, config.policy.converter)
    limits = limits_of(config, architecture)
    for groups in recorded_steps(record, limits, first=first, last=config.trainer.steps):
        for rollouts in groups:
            check_records(config, rollouts)


def limits_of(config: RunConfig, architecture: Architecture) -> Limits:
    """What recorded rollouts must fit to be trained on by this run."""
    return Limits(
        num_groups=config.trainer.prompts_per_step,
        group_size=config.trainer.samples_per_prompt,
        vocab_size=architecture.vocab_size,
        max_positions=architecture.max_positions,
    )


def notes(config: RunConfig, record: Path) -> list[str]:
    """What a person has to know of this run on recorded rollouts, a line each.

    `config` is the one that was asked for, evaluations included.
    """
    meta = read_meta(record)
    if meta is None:
        sampled = (
            "without meta.json: nobody checked that they were sampled by this model at "
            f"temperature {config.sampling.temperature}"
        )
    else:
        sampled = f"sampled by {meta.weights}"
    found = [f"training on the rollouts in {record}, {sampled}"]
    if config.evaluation.every:
        found.append("no evaluations: they need an engine; use `megatron-credit eval` afterwards")
    if config.trainer.check_sync:
        found.append("no trainer.check_sync: there is no engine to compare with")
    if config.trainer.resample_tries:
        found.append("no trainer.resample_tries: recorded groups are taken as they are")
    if config.objective.importance == "none":
        found.append(
            "objective.importance='none': nothing corrects for rollouts that other weights "
            "sampled; see mismatch/ in the metrics"
        )
    return found
