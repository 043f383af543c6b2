"""From credited rollouts to the numbers of the table."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_credit.batch.rollout import Rollout
from megatron_credit.batch.rollout_files import read_rollouts
from megatron_credit.trainer.localisation.culprits import Case, Groups
from megatron_credit.trainer.localisation.measure import (
    Estimate,
    Located,
    estimate,
    locate,
)
from megatron_credit.trainer.localisation.raw_signal import raw_signal
from megatron_credit.trainer.localisation.record import Record
from megatron_credit.trainer.localisation.rows import Form, Row
from megatron_credit.trainer.recorded_steps import split

POINTING = ("mass", "before", "rank", "first", "auc")
"""Measures of anything that points at tokens."""
SIGNED = ("praise", "uniform")
"""Further ones of an advantage."""


@dataclass(frozen=True)
class Result:
    """A line of the table."""

    row: Row
    credit: dict[str, Estimate]
    """By measure, of the advantages (of w where the row is about that)."""
    signal: dict[str, Estimate]
    """By measure, of what the method reads; empty where it reads nothing of single tokens."""
    cases: int
    """Responses looked at; `credit["mass"].count` of them got any credit."""


@dataclass(frozen=True)
class RecordFigures:
    """What the rollouts are."""

    form: Form
    path: str
    prompts: int
    rollouts: int
    right: float
    """Share of the rollouts."""
    mixed_groups: int
    """In which a wrong response has a known first wrong step."""
    cases: dict[Groups, int]
    """Responses with one."""


def describe_record(form: Form, record: Record, cases: dict[Groups, list[Case]]) -> RecordFigures:
    """The figures of a record."""
    rewards = [rollout.reward for group in record.groups for rollout in group]
    return RecordFigures(
        form=form,
        path=str(record.path),
        prompts=len(record.groups),
        rollouts=len(rewards),
        right=sum(reward >= 0.5 for reward in rewards) / len(rewards),
        mixed_groups=len({case.group for case in cases["mixed"]}),
        cases={kind: len(found) for kind, found in cases.items()},
    )


def measure_row(row: Row, cases: Sequence[Case], credited: Path, seed: int) -> Result:
    """The measures of one row over all its cases."""
    groups = split(list(read_rollouts(credited)))
    found = [groups[case.group][case.sample] for case in cases]
    group_R = torch.tensor([case.group for case in cases])
    credit = [locate_in(credit_of(row, one), case) for one, case in zip(found, cases, strict=True)]
    needs = row.method.needs
    signals = [raw_signal(one.token_values, needs) for one in found]
    read = [
        (case.group, locate_in(signal, case))
        for signal, case in zip(signals, cases, strict=True)
        if signal is not None
    ]
    signal_group_R = torch.tensor([group for group, _ in read])
    return Result(
        row=row,
        credit=estimates(credit, group_R, (*POINTING, *SIGNED), seed),
        signal=estimates([one for _, one in read], signal_group_R, POINTING, seed) if read else {},
        cases=len(cases),
    )


def credit_of(row: Row, rollout: Rollout) -> Tensor:
    """[T] float64 of the whole response: what the row is about, below 0 where it blames."""
    if row.quantity == "advantages":
        return torch.tensor(rollout.advantages, dtype=torch.float64)
    # A weight moves a wrong response's tokens away from what was sampled.
    return -torch.tensor(rollout.token_values[row.quantity], dtype=torch.float64)


def locate_in(value_T: Tensor, case: Case) -> Located:
    """The measures of values of a whole response."""
    return locate(value_T[list(case.tokens)], torch.tensor(case.steps), case.culprit)


def estimates(
    found: Sequence[Located], group_R: Tensor, measures: Sequence[str], seed: int
) -> dict[str, Estimate]:
    """The mean of each of these measures."""
    return {
        name: estimate(
            torch.tensor([vars(one)[name] for one in found], dtype=torch.float64),
            group_R,
            seed=seed,
        )
        for name in measures
    }
