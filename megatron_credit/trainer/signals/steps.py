"""Reasoning steps and what the process reward model says of them."""

import logging
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from megatron_credit.batch.rollout import Rollout, Span
from megatron_credit.credit.step_spans import step_ids, step_texts
from megatron_credit.mcore.exchange import broadcast_payload
from megatron_credit.rewards.prm.scorer import StepScorer
from megatron_credit.rewards.prm.steps import StepItem
from megatron_credit.trainer.signals.shared import padded, padded_floats, spans_of
from megatron_credit.trainer.signals.step import Found, StepData
from megatron_credit.trainer.signals.token_texts import token_texts

log = logging.getLogger(__name__)
SHOWN_FAILURES = 5


class StepSource:
    """Steps and scores, asked for where a group needs them and nowhere else."""

    signals: tuple[str, ...] = ("step_id_NT", "step_score_NS")

    def __init__(
        self, scorer: StepScorer | None, tokenizer: PreTrainedTokenizerBase, *, separator: str
    ) -> None:
        """`scorer` exists on the rank that sampled."""
        self._scorer, self._tokenizer, self._separator = scorer, tokenizer, separator

    def compute(self, data: StepData) -> Found:
        """Both signals of the groups that need them; NaN where the model failed."""
        found, tensors = Found(), {}
        if data.records is not None:
            tensors = self._score(data, found)
        header, shared = broadcast_payload(found.metrics, tensors)
        found.metrics = header
        for at in data.needing(self.signals):
            found.fields[at] = {
                "step_id_NT": shared[f"{at}.id"],
                "step_score_NS": shared[f"{at}.score"],
            }
        return found

    def _score(self, data: StepData, found: Found) -> dict:
        assert data.records is not None and self._scorer is not None
        needing = data.needing(self.signals)
        rollouts = [rollout for at in needing for rollout in data.records[at]]
        ids, items = self._split(rollouts)
        scores = self._scorer.score(items)
        pairs = zip(rollouts, scores, strict=True)
        failed = [(rollout, one.problem) for rollout, one in pairs if one.problem]
        for rollout, problem in failed[:SHOWN_FAILURES]:
            log.warning(
                "no scores for %s, sample %d: %s", rollout.prompt_id, rollout.sample, problem
            )
        found.metrics = {
            "prm/rollouts": float(len(items)),
            "prm/errors": float(len(failed)),
        }
        tensors, start = {}, 0
        for at in needing:
            end = start + len(data.records[at])
            tensors[f"{at}.id"] = padded(ids[start:end], -1)
            tensors[f"{at}.score"] = padded_floats([one.scores for one in scores[start:end]])
            for row, place in enumerate(range(start, end)):
                found.note(at, row).spans["step"] = [
                    Span(first, last, score)
                    for (first, last), score in zip(
                        spans_of(ids[place]), scores[place].scores, strict=True
                    )
                ]
            start = end
        return tensors

    def _split(self, rollouts: Sequence[Rollout]) -> tuple[list[list[int]], list[StepItem]]:
        ids, items = [], []
        for rollout in rollouts:
            texts = token_texts(self._tokenizer, rollout.response_ids)
            ids.append(step_ids(texts, separator=self._separator))
            items.append(
                StepItem(
                    prompt=question(rollout),
                    steps=tuple(step_texts(texts, ids[-1])),
                    metadata=rollout.metadata,
                )
            )
        return ids, items


def question(rollout: Rollout) -> str:
    """What the model was asked last."""
    asked = [turn["content"] for turn in rollout.messages if turn["role"] == "user"]
    return asked[-1] if asked else ""
