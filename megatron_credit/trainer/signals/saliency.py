"""Gradient-activation saliency of the boxed answer, and which tokens spell it."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from megatron_credit.batch.sequence import TrainSequence
from megatron_credit.credit.answer_span import AnswerPart, answer_parts
from megatron_credit.mcore.exchange import broadcast_payload
from megatron_credit.trainer.signals.config import SaliencySection
from megatron_credit.trainer.signals.shared import distinct, ids_of, padded
from megatron_credit.trainer.signals.step import Found, StepData
from megatron_credit.trainer.signals.token_texts import token_texts

THINKING_END = "</think>"


class SaliencyPass(Protocol):
    """What the source asks of the policy; collective on all ranks."""

    def saliency(
        self,
        sequences: list[TrainSequence],
        answer_parts: list[Tensor],
        section: SaliencySection,
    ) -> list[Tensor]:
        """Saliency of each response token."""
        ...


class SaliencySource:
    """Saliency of the rows that the method weighs, answer parts of all."""

    signals: tuple[str, ...] = ("saliency_NT", "answer_part_NT")

    def __init__(
        self,
        section: SaliencySection,
        passes: SaliencyPass,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self._section, self._passes, self._tokenizer = section, passes, tokenizer

    def compute(self, data: StepData) -> Found:
        """Both signals of the groups that need them; 0 in rows whose saliency nobody reads."""
        found, needing = Found(), data.needing(self.signals)
        tensors = {}
        if data.records is not None:
            for at in needing:
                rows = [self._parts(rollout.response_ids) for rollout in data.records[at]]
                tensors[str(at)] = padded(rows, int(AnswerPart.NONE))
        _, shared = broadcast_payload({}, tensors)
        places, sequences, parts = [], list[TrainSequence](), list[Tensor]()
        for at in needing:
            part_NT = shared[str(at)]
            saliency_NT = torch.zeros(data.groups[at].mask_NT.shape)
            found.fields[at] = {"answer_part_NT": part_NT, "saliency_NT": saliency_NT}
            read_N = data.method.reads(data.groups[at], "saliency_NT")
            read_N = read_N & (part_NT > AnswerPart.NONE).any(dim=1)
            for row in read_N.nonzero()[:, 0].tolist():
                sequence = data.sequences[at][row]
                places.append((at, row))
                sequences.append(sequence)
                parts.append(part_NT[row, : sequence.num_response])
        first, same = distinct([ids_of(one.token_ids_L, one.num_prompt) for one in sequences])
        scores = self._passes.saliency(
            [sequences[number] for number in first],
            [parts[number] for number in first],
            self._section,
        )
        for (at, row), number in zip(places, same, strict=True):
            saliency_T = scores[number]
            found.fields[at]["saliency_NT"][row, : len(saliency_T)] = saliency_T
            if data.records is not None:
                found.note(at, row).token_values["saliency"] = saliency_T.tolist()
        return found

    def _parts(self, ids: Sequence[int]) -> list[int]:
        """The answer's tokens, looked for behind the thinking."""
        texts = token_texts(self._tokenizer, ids)
        start = thinking_tokens(texts)
        thinking = [int(AnswerPart.NONE)] * start
        return thinking + answer_parts(texts[start:], box=self._section.box)


def thinking_tokens(texts: Sequence[str], end: str = THINKING_END) -> int:
    """How many tokens there are up to the end of the thinking, that mark included; 0 without it."""
    at = "".join(texts).rfind(end)
    if at < 0:
        return 0
    length = 0
    for number, text in enumerate(texts, start=1):
        length += len(text)
        if length >= at + len(end):
            return number
    return len(texts)
