"""Recorded rollouts as the groups of each step: found, put together and checked."""

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_credit.batch.rollout import Rollout
from megatron_credit.batch.rollout_files import read_rollouts
from megatron_credit.trainer.attempts import ATTEMPT, check_attempts

STEP_FILE = re.compile(r"step-(\d{6})\.(jsonl|parquet)")
LARGEST_LOGPROB = 1e-3
"""Above 0 by no more than an engine's rounding; a probability is far above it."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the rollouts of a step must fit."""

    num_groups: int
    group_size: int
    vocab_size: int
    max_positions: int


def step_files(directory: Path) -> dict[int, Path]:
    """The file of each step, in order; ValueError where a step has two."""
    found: dict[int, Path] = {}
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        match = STEP_FILE.fullmatch(path.name)
        if match:
            if int(match[1]) in found:
                raise ValueError(f"{directory} has two files of step {int(match[1])}; delete one")
            found[int(match[1])] = path
    return found


def recorded_steps(
    record: Path, limits: Limits, *, first: int, last: int
) -> Iterator[list[list[Rollout]]]:
    """The groups of each step from `first` to `last`.

    A directory has a file for each step; in a single file the groups of all steps follow each
    other. ValueError, with the place, where a step is missing or does not fit the limits.
    """
    if not record.exists():
        raise ValueError(f"there are no rollouts at {record}; name a directory or a file of them")
    if not record.is_dir():
        yield from steps_of_file(record, limits, first=first, last=last)
        return
    files = step_files(record)
    missing = [step for step in range(first, last + 1) if step not in files]
    if missing:
        raise ValueError(
            f"{record} has no rollouts of step {ranges(missing)} (steps {first} to {last} are to "
            "be trained); sample them with `megatron-credit rollout --steps`, or lower "
            "trainer.steps"
        )
    for step in range(first, last + 1):
        yield whole_groups(list(read_rollouts(files[step])), limits, place=str(files[step]))


def steps_of_file(
    path: Path, limits: Limits, *, first: int, last: int
) -> Iterator[list[list[Rollout]]]:
    """The groups of each step from a file that holds those of all steps from the first."""
    size = limits.num_groups * limits.group_size
    rollouts = itertools.islice(read_rollouts(path), (first - 1) * size, None)
    for step in range(first, last + 1):
        members = list(itertools.islice(rollouts, size))
        if not members:
            raise ValueError(
                f"{path} ends after step {step - 1} of {last}: a step takes {limits.num_groups} "
                f"groups of {limits.group_size}; lower trainer.steps, or give a longer record"
            )
        yield whole_groups(members, limits, place=f"{path}, step {step}")


def whole_groups(rollouts: Sequence[Rollout], limits: Limits, *, place: str) -> list[list[Rollout]]:
    """The groups of one step, each rollout of which can be trained on."""
    groups = split(rollouts)
    for group in groups:
        check_group(group, limits, place=place)
        for rollout in group:
            check_tokens(rollout, limits, place=place)
    if len(groups) != limits.num_groups:
        raise ValueError(
            f"{place} holds {len(groups)} groups; expected trainer.prompts_per_step="
            f"{limits.num_groups}"
        )
    return groups


def split(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """Runs of rollouts of one prompt; a sample number 0 begins a new one."""
    groups: list[list[Rollout]] = []
    for rollout in rollouts:
        if not groups or rollout.sample == 0 or rollout.prompt_id != groups[-1][0].prompt_id:
            groups.append([])
        groups[-1].append(rollout)
    return groups


def check_group(group: Sequence[Rollout], limits: Limits, *, place: str) -> None:
    """ValueError where this is no group of `group_size` answers to one prompt."""
    prompt = f"{place}: the group of prompt {group[0].prompt_id!r}"
    if len(group) != limits.group_size:
        raise ValueError(
            f"{prompt} has {len(group)} rollouts; expected trainer.samples_per_prompt="
            f"{limits.group_size}, one after the other"
        )
    samples = [rollout.sample for rollout in group]
    if samples != list(range(limits.group_size)):
        raise ValueError(f"{prompt} has samples {samples}; expected 0 to {limits.group_size - 1}")
    if any(rollout.prompt_ids != group[0].prompt_ids for rollout in group):
        raise ValueError(f"{prompt} has different prompt_ids; its rollouts must share one prompt")


def check_tokens(rollout: Rollout, limits: Limits, *, place: str) -> None:
    """ValueError where the model cannot read the tokens, or a trained one has no log-prob."""
    name = f"{place}: prompt {rollout.prompt_id!r}, sample {rollout.sample}"
    token_ids = rollout.prompt_ids + rollout.response_ids
    if not rollout.prompt_ids:
        raise ValueError(f"{name} has no prompt tokens; a response needs something to follow")
    if len(token_ids) > limits.max_positions:
        raise ValueError(
            f"{name} has {len(token_ids)} tokens; the model has {limits.max_positions} positions"
        )
    if min(token_ids) < 0 or max(token_ids) >= limits.vocab_size:
        strange = next(one for one in token_ids if not 0 <= one < limits.vocab_size)
        raise ValueError(
            f"{name} has token id {strange}; the model's are 0 to {limits.vocab_size - 1}"
        )
    for place_in, (logprob, trained) in enumerate(zip(rollout.logprobs, rollout.mask, strict=True)):
        if trained and not -math.inf < logprob <= LARGEST_LOGPROB:
            raise ValueError(
                f"{name} has log-prob {logprob} at response token {place_in}; a token that is "
                "trained on (mask true) needs the finite log-prob, at most 0, that it was sampled "
                "with"
            )
    if ATTEMPT in rollout.spans:
        check_attempts(rollout, name)
    if math.isinf(rollout.reward):
        raise ValueError(f"{name} has reward {rollout.reward}; give a number, or null for none")


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in short: 3, 5-7."""
    shown: list[str] = []
    for _, run in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        shown.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ", ".join(shown)
