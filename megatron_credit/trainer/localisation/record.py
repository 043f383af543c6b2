"""The rollouts that every method is given: sampled once and kept, or recorded before."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from rich.console import Console

from megatron_credit.batch.rollout import Rollout
from megatron_credit.batch.rollout_files import read_rollouts
from megatron_credit.mcore.architecture import read_architecture
from megatron_credit.rewards.find_answer import last_box
from megatron_credit.tasks.chain_sum import ChainSumConfig
from megatron_credit.trainer.attempts import ATTEMPT
from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.localisation.rows import Form
from megatron_credit.trainer.record_rollouts import record_rollouts
from megatron_credit.trainer.recorded_steps import Limits, split, step_files, whole_groups
from megatron_credit.trainer.rollout_meta import check_loadable, describe_sampling, read_meta

FORMS: tuple[Form, ...] = get_args(Form)


@dataclass(frozen=True)
class Record:
    """Rollouts of one form, those of a prompt together."""

    path: Path
    groups: list[list[Rollout]]


def sample_record(
    config: RunConfig, form: Form, output: Path, console: Console, *, weights: str | None
) -> Record:
    """The record of this form in `output`, where there is none sampled as the run's first step."""
    assert isinstance(config.task, ChainSumConfig)
    task = config.task.model_copy(update={"answer_format": form})
    path = output / form
    record_rollouts(
        config.model_copy(update={"task": task}),
        console,
        steps=range(1, 2),
        output=path,
        weights=weights,
        suffix=".jsonl",
    )
    return read_record(config, path)


def given_records(config: RunConfig, path: Path, wanted: Collection[Form]) -> dict[Form, Record]:
    """The records at a path: a file or a directory of steps, or one with a directory for each form.

    ValueError where there is none of a wanted form.
    """
    places = [path / form for form in FORMS if path.is_dir() and step_files(path / form)]
    found: dict[Form, Record] = {}
    for place in places or [path]:
        record = read_record(config, place)
        found[form_of(record.groups)] = record
    if not found.keys() & set(wanted):
        raise ValueError(
            f"{path} has answers in {', '.join(found)}, but these methods need them in "
            f"{', '.join(wanted)}; name other methods or another record"
        )
    return found


def read_record(config: RunConfig, path: Path) -> Record:
    """The groups of all steps of a file or a directory; each can be read by the model.

    ValueError with the place where that is not so, or where the record was sampled by another kind
    of model or at another temperature.
    """
    meta = read_meta(path) if path.exists() else None
    if meta is not None:
        expected = describe_sampling(config, questions=meta.questions, weights=meta.weights)
        check_loadable(path, meta, expected)
    files = list(step_files(path).values()) if path.is_dir() else [path]
    rollouts = [rollout for file in files for rollout in read_rollouts(file)]
    if not rollouts:
        raise ValueError(f"there are no rollouts at {path}; name a directory or a file of them")
    if any(ATTEMPT in rollout.spans for rollout in rollouts):
        raise ValueError(
            f"{path} has rollouts of several attempts; the benchmark reads single ones"
        )
    architecture = read_architecture(config.policy.model, config.policy.converter)
    limits = Limits(
        num_groups=len(split(rollouts)),
        group_size=len(split(rollouts)[0]),
        vocab_size=architecture.vocab_size,
        max_positions=architecture.max_positions,
    )
    return Record(path, whole_groups(rollouts, limits, place=str(path)))


def form_of(groups: Sequence[Sequence[Rollout]]) -> Form:
    """boxed where some answer stands in a box."""
    boxed = any(last_box(rollout.text) is not None for group in groups for rollout in group)
    return "boxed" if boxed else "tags"
