"""How likely the group's answers are after each segment of each chain of thought.

Shape letters: N rollouts of a group, T response tokens, M segments, P = M + 1 states, Y answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from megatron_credit.batch.probes import Continuation, ProbedRollout
from megatron_credit.batch.rollout import Rollout, Span
from megatron_credit.batch.scored import Scored
from megatron_credit.batch.sequence import TrainSequence
from megatron_credit.credit.baselines import has_verdict, is_verified
from megatron_credit.credit.group import Group
from megatron_credit.credit.segments import group_segment_ids, segment_ids
from megatron_credit.mcore.exchange import broadcast_payload
from megatron_credit.trainer.signals.config import ProbesSection
from megatron_credit.trainer.signals.saliency import thinking_tokens
from megatron_credit.trainer.signals.shared import spans_of
from megatron_credit.trainer.signals.step import Found, StepData
from megatron_credit.trainer.signals.token_texts import token_texts

NO_ANSWER = -1


class ProbePass(Protocol):
    """What the source asks of the policy; collective on all ranks."""

    def probe_answers(self, rollouts: list[ProbedRollout]) -> list[Tensor]:
        """[P, Y] of each rollout: log p(answer | state)."""
        ...


@dataclass(frozen=True)
class Chain:
    """One response, cut."""

    segments: list[int]
    """The segment of each token of the chain of thought; what follows is the answer."""
    thinking: int
    """Tokens of it before the model's thinking is closed; 0: it does not think apart."""

    def states(self) -> list[int]:
        """Tokens of the chain in each of its states."""
        return [0, *(end for _, end in spans_of(self.segments))]


class ProbeSource:
    """Segments, answers, and what the answer probes say."""

    signals: tuple[str, ...] = (
        "segment_id_NT",
        "answer_logprob_NMY",
        "utility_Y",
        "answer_index_N",
    )

    def __init__(
        self,
        section: ProbesSection,
        passes: ProbePass,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_positions: int,
    ) -> None:
        """`max_positions`: tokens that the model can read; a rollout whose probes are longer has
        none."""
        self._section, self._passes, self._tokenizer = section, passes, tokenizer
        self._max_positions = max_positions

    def compute(self, data: StepData) -> Found:
        """All four signals of the groups that need them, from one pass over all rollouts."""
        found, needing = Found(), data.needing(self.signals)
        header, tensors = {}, {}
        if data.records is not None:
            for at in needing:
                scored = None if data.scored is None else data.scored[at]
                header[str(at)], own = self._cut(data.groups[at], data.records[at], scored)
                tensors |= {f"{at}.{name}": tensor for name, tensor in own.items()}
                self._tell(found, at, own["segment_id_NT"], header[str(at)]["num_segments"])
        header, shared = broadcast_payload(header, tensors)
        asked = [
            (at, row, _probed(data.sequences[at][row], states, continuations))
            for at in needing
            for row, states, continuations in header[str(at)]["asked"]
        ]
        scores = self._passes.probe_answers([rollout for _, _, rollout in asked])
        logprobs: dict[tuple[int, int], list[Tensor]] = {}
        for (at, row, _), found_PY in zip(asked, scores, strict=True):
            logprobs.setdefault((at, row), []).append(found_PY)
        for at in needing:
            signals = self.signals
            own = {name: shared[f"{at}.{name}"] for name in signals if f"{at}.{name}" in shared}
            rows = [logprobs.get((at, row), []) for row in range(len(data.sequences[at]))]
            num_states = header[str(at)]["num_segments"] + 1
            own["answer_logprob_NMY"] = _stacked(rows, num_states, len(own["utility_Y"]))
            found.fields[at] = own
        return found

    def _cut(
        self, group: Group, rollouts: Sequence[Rollout], scored: Sequence[Scored] | None
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What is asked of a group's rollouts, and the signals that the texts alone give."""
        chains = [
            self._chain(rollout, None if scored is None else scored[row].entropy_T.tolist())
            for row, rollout in enumerate(rollouts)
        ]
        lengths = [len(rollout.response_ids) for rollout in rollouts]
        segment_NT, num_segments = group_segment_ids([chain.segments for chain in chains], lengths)
        answers, index = distinct_answers(group, rollouts)
        verified_N = is_verified(group.reward_N).tolist()
        utility = [float(verified_N[index.index(column)]) for column in range(len(answers))]
        asked = []
        for row in has_verdict(group.reward_N).nonzero()[:, 0].tolist():
            states, closed = chains[row].states(), chains[row].thinking
            # Inside its thinking the model is made to end it first.
            inside = [state for state in states if state < closed]
            outside = [state for state in states if state >= closed]
            asks = [
                (row, own, self._continuations(answers, thinks=thinks))
                for own, thinks in ((inside, True), (outside, False))
                if own
            ]
            longest = max(_longest(own, continuations) for _, own, continuations in asks)
            if len(rollouts[row].prompt_ids) + longest <= self._max_positions:
                asked += asks
        return {"asked": asked, "num_segments": num_segments}, {
            "segment_id_NT": segment_NT,
            "utility_Y": torch.tensor(utility, dtype=torch.float64),
            "answer_index_N": torch.tensor(index, dtype=torch.int64),
        }

    def _chain(self, rollout: Rollout, entropies: list[float] | None) -> Chain:
        texts = token_texts(self._tokenizer, rollout.response_ids)
        end = self._chain_end(texts)
        known = [float("nan")] * end if entropies is None else entropies[:end]
        section = self._section
        thinking = 0
        if section.thinking_end:
            thinking = thinking_tokens(texts[:end], section.thinking_end) or end + 1
        return Chain(segment_ids(texts[:end], known, section.segmenter), thinking)

    def _chain_end(self, texts: Sequence[str]) -> int:
        """The token at which the last complete answer begins; all tokens where there is none."""
        whole, opening = "".join(texts), self._section.opening
        # One that opens behind the last closing is not complete.
        end = whole.rfind(self._section.closing)
        at = whole.rfind(opening, 0, end) if opening and end >= 0 else -1
        if at < 0:
            return len(texts)
        length = 0
        for number, text in enumerate(texts):
            length += len(text)
            if length > at:
                return number
        return len(texts)

    def _continuations(self, answers: Sequence[str], *, thinks: bool) -> list[list[list[int]]]:
        """Token ids of the opening, and of each answer with its closing."""
        section = self._section
        opening = (section.thinking_end if thinks else "") + section.opening
        return [
            [self._encode(opening), self._encode(answer + section.closing)] for answer in answers
        ]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _tell(self, found: Found, at: int, segment_NT: Tensor, num_segments: int) -> None:
        for row, ids in enumerate(segment_NT.tolist()):
            chain = [segment if segment < num_segments else NO_ANSWER for segment in ids]
            found.note(at, row).spans["segment"] = [Span(*span) for span in spans_of(chain)]


def _probed(
    sequence: TrainSequence, states: Sequence[int], continuations: Sequence[Sequence[Sequence[int]]]
) -> ProbedRollout:
    return ProbedRollout(
        sequence=sequence,
        states=tuple(states),
        continuations=tuple(
            Continuation(opening_ids=tuple(opening), answer_ids=tuple(answer))
            for opening, answer in continuations
        ),
    )


def _longest(states: Sequence[int], continuations: Sequence[Sequence[Sequence[int]]]) -> int:
    """Response tokens and appended ones of the longest probe."""
    return states[-1] + max((sum(map(len, one)) for one in continuations), default=0)


def distinct_answers(group: Group, rollouts: Sequence[Rollout]) -> tuple[list[str], list[int]]:
    """The parsed answers of the rollouts with a verdict, and the column of each rollout's own."""
    answers, index = list[str](), list[int]()
    for rollout, valid in zip(rollouts, has_verdict(group.reward_N).tolist(), strict=True):
        if not valid or rollout.parsed is None:
            index.append(NO_ANSWER)
            continue
        if rollout.parsed not in answers:
            answers.append(rollout.parsed)
        index.append(answers.index(rollout.parsed))
    return answers, index


def _stacked(logprobs: Sequence[Sequence[Tensor]], num_states: int, num_answers: int) -> Tensor:
    """[N, P, Y] float64 from the parts of each row, NaN after its own last state."""
    stacked_NPY = torch.full(
        (len(logprobs), num_states, num_answers), torch.nan, dtype=torch.float64
    )
    for row, parts in enumerate(logprobs):
        if parts:
            own_PY = torch.cat(list(parts))
            stacked_NPY[row, : len(own_PY)] = own_PY.double()
    return stacked_NPY
