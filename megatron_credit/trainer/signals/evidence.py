"""Signals of teachers that read each rollout behind evidence: log-probs, divergences, contrasts.

Shape letters: N rollouts of a group, R rollouts of a step, C contexts that teachers read.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import accumulate, islice, pairwise

import torch
from torch import Tensor

from megatron_credit.batch.sequence import TrainSequence
from megatron_credit.batch.views import Views
from megatron_credit.credit.baselines import has_verdict
from megatron_credit.credit.need import EvidenceNeed
from megatron_credit.mcore.exchange import broadcast_payload
from megatron_credit.trainer.signals.choice import Evidence, choose_evidence, reads_negatives
from megatron_credit.trainer.signals.config import EvidenceSection
from megatron_credit.trainer.signals.contexts import Context, ContextWriter, Place
from megatron_credit.trainer.signals.evidence_passes import Slots, TeacherPasses
from megatron_credit.trainer.signals.shared import distinct, ids_of
from megatron_credit.trainer.signals.step import Found, StepData

LOGPROBS = ("positive_logprob_NT", "negative_logprob_NT")
DIVERGENCES = ("teacher_kl_NT", "reference_index_N")
COUNTED = ("evidence/rollouts", "evidence/cut", "evidence/no_room")
"""Shares of the rollouts: with evidence, with some that was cut, with some that did not fit."""
CONTRASTS = ("contrast_target_NT", "contrast_mean_NT", "contrast_cost_NT")


class EvidenceSource:
    """Reads rollouts behind siblings, references or answers, as a method's need says."""

    signals: tuple[str, ...] = (*LOGPROBS, *DIVERGENCES, *CONTRASTS)

    def __init__(
        self,
        need: EvidenceNeed,
        section: EvidenceSection,
        passes: TeacherPasses,
        writer: ContextWriter,
        *,
        keeps_views: bool,
    ) -> None:
        """`keeps_views`: a loss reads the rollouts behind their evidence again."""
        self._need, self._section, self._passes = need, section, passes
        self._writer, self._keeps_views = writer, keeps_views
        drawn = need.negatives if need.negative == "drawn_sibling" else section.negatives
        count = 1 if need.negative == "answer" else drawn
        count = count if reads_negatives(need, section) else 0
        self.slots = Slots.of(need, num_negatives=count, reads_itself=passes.reads_itself)

    def compute(self, data: StepData) -> Found:
        """The signals of the groups that need them."""
        found = Found()
        payload = self._contexts(data, found) if data.records is not None else ({}, {})
        header, shared = broadcast_payload(*payload)
        found.metrics |= header
        views = self._views(data, shared["context_ids"], shared["context_length_RC"])
        if not data.needing(self.signals):
            scores: list[dict[str, Tensor]] = [{} for _ in views]
        elif set(data.method.needs) & {*DIVERGENCES, *CONTRASTS}:
            scores = self._compare(views, set(data.method.needs))
        else:
            scores = self._logprobs(views)
        self._fill(data, scores, shared["reference_R"], found)
        if self._keeps_views:
            found.views = views
        return found

    def _contexts(self, data: StepData, found: Found) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Token ids of the contexts of all rollouts, and who was whose reference."""
        assert data.records is not None
        ids, lengths, references = list[int](), list[list[int]](), list[int]()
        counts: dict[str, float] = dict.fromkeys(COUNTED, 0.0)
        needing = set(data.needing(self.signals))
        for at, (group, rollouts) in enumerate(zip(data.groups, data.records, strict=True)):
            evidence = choose_evidence(self._need, self._section, group, rollouts)
            read_N = self._read(data, at) & has_verdict(group.reward_N)
            for row, chosen in enumerate(evidence):
                reads = at in needing and bool(read_N[row])
                contexts = self._write(data, (at, row), chosen, found, counts) if reads else []
                found_ids = [context.prompt_ids if context else [] for context in contexts]
                ids += [token for prompt in found_ids for token in prompt]
                row_lengths = [len(prompt) for prompt in found_ids]
                lengths.append(row_lengths + [0] * (self._num_texts - len(row_lengths)))
                references.append(chosen.reference)
        total = max(sum(map(len, data.records)), 1)
        return {name: count / total for name, count in counts.items()}, {
            "context_ids": torch.tensor(ids, dtype=torch.int64),
            "context_length_RC": torch.tensor(lengths, dtype=torch.int64).view(-1, self._num_texts),
            "reference_R": torch.tensor(references, dtype=torch.int64),
        }

    @property
    def _num_texts(self) -> int:
        return 1 + len(self.slots.negatives)

    def _read(self, data: StepData, at: int) -> Tensor:
        """[N] bool: rows whose values of any signal make a difference."""
        read_N = torch.zeros_like(data.groups[at].reward_N, dtype=torch.bool)
        for signal in data.wanted[at].intersection(self.signals):
            read_N |= data.method.reads(data.groups[at], signal)
        return read_N

    def _write(
        self,
        data: StepData,
        place: tuple[int, int],
        chosen: Evidence,
        found: Found,
        counts: dict[str, float],
    ) -> list[Context | None]:
        """The contexts of one rollout: for its answer, and against it."""
        assert data.records is not None
        rollout = data.records[place[0]][place[1]]
        texts = [chosen.positive, *chosen.negatives]
        turn = self._turn()
        contexts = [
            None if text is None else self._writer.write(rollout, text, turn) for text in texts
        ]
        found.note(*place).evidence |= chosen.texts()
        present = [context for context in contexts if context is not None]
        asked = [text for text in texts if text is not None]
        counts["evidence/rollouts"] += bool(present)
        counts["evidence/cut"] += any(context.is_cut for context in present)
        counts["evidence/no_room"] += len(present) < len(asked)
        return contexts

    def _turn(self) -> Place:
        if self._need.positive == "reference":
            return "system"
        if self._need.positive == "answer":
            return "answer_bare" if self._section.template == "bare" else "answer_wrapped"
        return "user"

    def _views(self, data: StepData, ids: Tensor, length_RC: Tensor) -> list[Views]:
        """Every rollout of the step behind its contexts."""
        prompts = iter(ids.split(length_RC.flatten().tolist()))
        sequences = [sequence for group in data.sequences for sequence in group]
        views = []
        for sequence in sequences:
            texts = [
                prompt if len(prompt) else None for prompt in islice(prompts, length_RC.shape[1])
            ]
            plain = sequence.token_ids_L[: sequence.num_prompt]
            free = [plain] * self.slots.free
            views.append(Views.behind(sequence, [*free, *texts]))
        return views

    def _compare(self, views: list[Views], needs: set[str]) -> list[dict[str, Tensor]]:
        """Divergences or contrasts of each rollout; nothing of those without evidence."""
        slots = self.slots
        contrast = slots.contrast(self._section.contrast) if needs & set(CONTRASTS) else None
        present = [one.teachers[slots.positive - 1] is not None for one in views]
        # What a loss reads again is read once, and then of all rollouts.
        read = [at for at, has in enumerate(present) if has or self._keeps_views]
        keys = [at if self._keeps_views else _same_views(views[at]) for at in read]
        first, place = distinct(keys)
        scores = self._passes.score_views(
            [views[read[number]] for number in first],
            contrast=contrast,
            section=self._section,
            keep=self._keeps_views,
        )
        named: list[dict[str, Tensor]] = [{} for _ in views]
        for at, number in zip(read, place, strict=True):
            if not present[at]:
                continue
            one = scores[number]
            if contrast is None:
                named[at] = {"teacher_kl_NT": one.kl_teacher_student_CT[slots.positive]}
            else:
                named[at] = {name: vars(one)[name.replace("_NT", "_T")] for name in CONTRASTS}
        return named

    def _logprobs(self, views: list[Views]) -> list[dict[str, Tensor]]:
        """Log-probs of the sampled tokens behind each context."""
        behind = [
            (at, context, _as_sequence(one, context))
            for at, one in enumerate(views)
            for context in range(1, one.num_contexts)
            if one.teachers[context - 1] is not None
        ]
        first, place = distinct([ids_of(one.token_ids_L, one.num_prompt) for _, _, one in behind])
        scores = self._passes.teacher_logprobs([behind[number][2] for number in first])
        found: list[dict[int, Tensor]] = [{} for _ in views]
        for (at, context, _), number in zip(behind, place, strict=True):
            found[at][context] = scores[number]
        return [self._by_sign(contexts) for contexts in found]

    def _by_sign(self, logprobs: dict[int, Tensor]) -> dict[str, Tensor]:
        named = {}
        if self.slots.positive in logprobs:
            named["positive_logprob_NT"] = logprobs[self.slots.positive]
        against = [logprobs[slot] for slot in self.slots.negatives if slot in logprobs]
        if against:
            stacked_KT = torch.stack(against).double()
            mean_T = stacked_KT.logsumexp(dim=0) - math.log(len(against))
            named["negative_logprob_NT"] = mean_T.float()
        return named

    def _fill(
        self,
        data: StepData,
        scores: Sequence[dict[str, Tensor]],
        reference_R: Tensor,
        found: Found,
    ) -> None:
        """Puts what was found into the groups' fields: NaN without evidence, 0 where unread."""
        ends = list(accumulate((len(group) for group in data.sequences), initial=0))
        for at in data.needing(self.signals):
            start, end = list(pairwise(ends))[at]
            group, fields = data.groups[at], found.fields.setdefault(at, {})
            for signal in data.wanted[at].intersection(self.signals) - {"reference_index_N"}:
                fields[signal] = self._padded(data, at, signal, scores[start:end])
                self._tell(data, at, signal, scores[start:end], found)
            if "reference_index_N" in data.wanted[at]:
                fields["reference_index_N"] = reference_R[start:end].to(group.reward_N.device)

    def _padded(
        self, data: StepData, at: int, signal: str, scores: Sequence[dict[str, Tensor]]
    ) -> Tensor:
        """[N, T] float32."""
        group = data.groups[at]
        filled_NT = torch.full(group.mask_NT.shape, math.nan)
        filled_NT[~data.method.reads(group, signal)] = 0.0
        for row, one in enumerate(scores):
            if signal in one:
                filled_NT[row, : len(one[signal])] = one[signal]
        return filled_NT

    def _tell(
        self,
        data: StepData,
        at: int,
        signal: str,
        scores: Sequence[dict[str, Tensor]],
        found: Found,
    ) -> None:
        if data.records is None:
            return
        for row, one in enumerate(scores):
            if signal in one:
                name = signal.removesuffix("_NT")
                found.note(at, row).token_values[name] = one[signal].tolist()


def _same_views(views: Views) -> Hashable:
    """A key that two rollouts share if their tokens do, in every context."""
    plain, teachers = views.plain, views.teachers
    return ids_of(plain.token_ids_L, plain.num_prompt), tuple(
        None if one is None else ids_of(one.token_ids_L, one.num_prompt) for one in teachers
    )


def _as_sequence(views: Views, context: int) -> TrainSequence:
    """The rollout in this context, to be scored like any other."""
    view = views.teachers[context - 1]
    assert view is not None
    return replace(
        views.plain,
        token_ids_L=view.token_ids_L,
        num_prompt=view.num_prompt,
        routed_experts_LDK=None,
    )
