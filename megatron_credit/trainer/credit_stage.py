"""From graded rollouts to training sequences with credit: signals, then the method, on every rank.

Shape letters: N rollouts of a group, T response tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from megatron_credit.batch.scored import Scored
from megatron_credit.batch.sequence import TrainSequence
from megatron_credit.batch.teaching import Teaching
from megatron_credit.batch.views import Views
from megatron_credit.credit import METHODS, CreditResult, Group, assign
from megatron_credit.credit.baselines import has_verdict
from megatron_credit.credit.method import CreditMethod
from megatron_credit.trainer.config import CreditSection
from megatron_credit.trainer.experience import Experience, advantage_metrics, pad_rows
from megatron_credit.trainer.sampler import derive_seed
from megatron_credit.trainer.signals.step import Note, Source, StepData

POLICY_LOGPROB = "policy_logprob_NT"


class Scorer(Protocol):
    """What the stage asks of the policy itself."""

    def score(self, sequences: list[TrainSequence]) -> list[Scored]:
        """Log-prob and entropy of each response token."""
        ...


class Lessons(Protocol):
    """Makes what the policy learns beside the surrogate."""

    def teaching(self, views: Sequence[Views], results: Sequence[CreditResult]) -> Teaching | None:
        """The losses over these rollouts' views; None where the method has none."""
        ...


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one optimizer step trains on."""

    sequences: list[TrainSequence]
    teaching: Teaching | None = None


@dataclass(frozen=True, kw_only=True)
class Credited:
    """A step's rollouts with their credit."""

    parts: list[Part]
    metrics: dict[str, float]
    notes: list[Note] = field(default_factory=list)
    """By rollout, on the rank that sampled; empty elsewhere."""


class CreditStage:
    """Computes what the method needs, once and only where it is read, then asks the method."""

    def __init__(
        self,
        *,
        credit: CreditSection,
        seed: int,
        num_parts: int,
        scorer: Scorer,
        sources: Sequence[Source] = (),
        lessons: Lessons | None = None,
        reads_entropy: bool = False,
    ) -> None:
        """`num_parts`: optimizer steps that a step is split into. `reads_entropy`: a source wants
        the policy's entropies where it has anything to do."""
        self._credit, self._seed, self._num_parts = credit, seed, num_parts
        self._method: CreditMethod = METHODS[credit.method].configure(credit.options)
        self._scorer, self._sources, self._lessons = scorer, sources, lessons
        self._reads_entropy = reads_entropy

    def assign(self, step: int, experience: Experience) -> Credited:
        """The sequences with their advantages, and what the method says of each optimizer step.

        Every rank computes the same.
        """
        data = self._data(self._groups(step, experience), experience)
        notes: dict[tuple[int, int], Note] = {}
        metrics, views = dict[str, float](), None
        for source in self._sources:
            found = source.compute(data)
            filled = [
                replace(one, **found.fields.get(at, {})) for at, one in enumerate(data.groups)
            ]
            data = replace(data, groups=filled)
            metrics |= found.metrics
            views = found.views or views
            merge_notes(notes, found.notes)
        results = self._ask(data.groups)
        parts = self._parts(experience, data, results, views)
        metrics |= mean_metrics(results)
        sequences = [sequence for part in parts for sequence in part.sequences]
        records = experience.records is not None
        return Credited(
            parts=parts,
            metrics=metrics | advantage_metrics(sequences),
            notes=flat_notes(notes, results, experience) if records else [],
        )

    def _groups(self, step: int, experience: Experience) -> list[Group]:
        places = experience.groups()
        share = len(places) // self._num_parts
        return [
            Group(
                reward_N=experience.reward_R[place],
                mask_NT=pad_rows([one.mask_T for one in experience.sequences[place]]),
                # Schedules count optimizer steps.
                step=(step - 1) * self._num_parts + number // share + 1,
                seed=derive_seed(self._seed, f"credit-{step}", str(number)),
            )
            for number, place in enumerate(places)
        ]

    def _data(self, groups: list[Group], experience: Experience) -> StepData:
        wanted = [frozenset(self._wanted(group)) for group in groups]
        places = experience.groups()
        reads_policy = any(POLICY_LOGPROB in signals for signals in wanted)
        reads_entropy = self._reads_entropy and any(wanted)
        scored = None
        if self._num_parts > 1 or reads_policy or reads_entropy:
            all_scored = self._scorer.score(experience.sequences)
            scored = [all_scored[place] for place in places]
        if reads_policy:
            assert scored is not None
            groups = [
                replace(group, policy_logprob_NT=pad_rows([one.logprob_T for one in own]))
                for group, own in zip(groups, scored, strict=True)
            ]
        records = experience.records
        return StepData(
            method=self._method,
            groups=groups,
            wanted=wanted,
            sequences=[experience.sequences[place] for place in places],
            records=None if records is None else [records[place] for place in places],
            scored=scored,
        )

    def _wanted(self, group: Group) -> tuple[str, ...]:
        """Nothing of a group that the method is not even asked about."""
        if self._method.needs_siblings and int(has_verdict(group.reward_N).sum()) < 2:
            return ()
        return self._method.required(group)

    def _ask(self, groups: Sequence[Group]) -> list[CreditResult]:
        """The method's answer for each group, those of an optimizer step together."""
        results, share = [], len(groups) // self._num_parts
        for start in range(0, len(groups), share):
            for group in self._method.over_step(groups[start : start + share]):
                results.append(assign(self._credit.method, group, **self._credit.options))
        return results

    def _parts(
        self,
        experience: Experience,
        data: StepData,
        results: Sequence[CreditResult],
        views: list[Views] | None,
    ) -> list[Part]:
        sequences = []
        for number, result in enumerate(results):
            for row, sequence in enumerate(data.sequences[number]):
                length = sequence.num_response
                selected_NT = result.selected_NT
                old_T = None
                if self._num_parts > 1:
                    assert data.scored is not None
                    old_T = data.scored[number][row].logprob_T
                sequences.append(
                    replace(
                        sequence,
                        advantage_T=result.advantage_NT[row, :length],
                        old_logprob_T=old_T,
                        selected_T=None if selected_NT is None else selected_NT[row, :length],
                    )
                )
        share, parts = len(sequences) // self._num_parts, []
        for start in range(0, len(sequences), share):
            part = slice(start, start + share)
            own = results[start // experience.group_size : (start + share) // experience.group_size]
            teaching = None
            if self._lessons is not None and views is not None:
                teaching = self._lessons.teaching(views[part], own)
            parts.append(Part(sequences=sequences[part], teaching=teaching))
        return parts


def mean_metrics(results: Sequence[CreditResult]) -> dict[str, float]:
    """The methods' metrics, averaged over the groups that have them."""
    found: dict[str, list[float]] = {}
    for result in results:
        for name, value in result.metrics.items():
            found.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}


def merge_notes(notes: dict[tuple[int, int], Note], more: dict[tuple[int, int], Note]) -> None:
    """Adds what another source has to tell."""
    for place, note in more.items():
        own = notes.setdefault(place, Note())
        own.token_values |= note.token_values
        own.spans |= note.spans
        own.evidence |= note.evidence


def flat_notes(
    notes: dict[tuple[int, int], Note],
    results: Sequence[CreditResult],
    experience: Experience,
) -> list[Note]:
    """A note for each rollout, with what the method said of its tokens besides the advantage."""
    flat = []
    for number, (result, place) in enumerate(zip(results, experience.groups(), strict=True)):
        for row, sequence in enumerate(experience.sequences[place]):
            note = notes.get((number, row), Note())
            weight_NT: Tensor | None = result.evidence_weight_NT
            if weight_NT is not None:
                note.token_values["evidence_weight"] = weight_NT[
                    row, : sequence.num_response
                ].tolist()
            flat.append(note)
    return flat
