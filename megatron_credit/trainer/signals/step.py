"""What the sources of signals share: one step's rollouts, and what was found of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from megatron_credit.batch.rollout import Rollout, Span
from megatron_credit.batch.scored import Scored
from megatron_credit.batch.sequence import TrainSequence
from megatron_credit.batch.views import Views
from megatron_credit.credit.group import Group
from megatron_credit.credit.method import CreditMethod


@dataclass(frozen=True, kw_only=True, eq=False)
class StepData:
    """The rollouts of a step, as every rank knows them but for the records."""

    method: CreditMethod
    groups: Sequence[Group]
    """Rewards, masks and seeds; what was found so far."""
    wanted: Sequence[frozenset[str]]
    """Signals that each group needs."""
    sequences: Sequence[Sequence[TrainSequence]]
    """Those of each group."""
    records: Sequence[Sequence[Rollout]] | None
    """What was sampled, with its texts, on the rank that sampled; None elsewhere."""
    scored: Sequence[Sequence[Scored]] | None
    """What the policy finds of each response token, where somebody asked."""

    def needing(self, signals: Sequence[str]) -> list[int]:
        """The groups that need any of these signals."""
        return [at for at, wanted in enumerate(self.wanted) if wanted.intersection(signals)]


@dataclass
class Note:
    """What a rollout's record tells of its signals, for people."""

    token_values: dict[str, list[float]] = field(default_factory=dict)
    spans: dict[str, list[Span]] = field(default_factory=dict)
    evidence: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class Found:
    """What a source found."""

    fields: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """By group: fields of `credit.Group`."""
    metrics: dict[str, float] = field(default_factory=dict)
    notes: dict[tuple[int, int], Note] = field(default_factory=dict)
    """By group and row, on the rank that sampled."""
    views: list[Views] | None = None
    """The step's rollouts behind their evidence, in order, where a loss reads them again."""

    def note(self, group: int, row: int) -> Note:
        """The note on a rollout, to be filled in."""
        return self.notes.setdefault((group, row), Note())


class Source(Protocol):
    """Computes signals. Every rank calls every method, with the same data but for the records."""

    signals: tuple[str, ...]
    """Fields of `credit.Group` that it fills."""

    def compute(self, data: StepData) -> Found:
        """Those of the groups that need them."""
        ...
