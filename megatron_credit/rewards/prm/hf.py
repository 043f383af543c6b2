"""A Hugging Face model as process reward model. B = rows of a batch, T = tokens, P = places where
scores are read, L = labels or label tokens, the first one good."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
from transformers.utils.logging import disable_progress_bar

from megatron_credit.rewards.prm.config import HfPrm
from megatron_credit.rewards.prm.hf_input import HfInput, TokenRow
from megatron_credit.rewards.prm.steps import ProcessSpent, StepItem, read_scores

MODELS = {"tokens": AutoModelForTokenClassification, "causal": AutoModelForCausalLM}


class HfScorer:
    """Reads the score of each step from the logits at one token."""

    def __init__(self, config: HfPrm, prepared: HfInput) -> None:
        """Loads the weights; ValueError where some are missing."""
        torch.set_num_threads(config.threads)
        self._input = prepared
        self._device = config.device
        self._model = load_model(config)
        # The logits of a language model at every token can take more memory than the model.
        forward = inspect.signature(self._model.forward)
        self._keeps_places = "logits_to_keep" in forward.parameters

    def score(self, items: Sequence[StepItem]) -> list[list[float] | str]:
        """Of each item its scores or why there are none."""
        rows = [self._input.row(item) for item in items]
        readable = [row for row in rows if isinstance(row, TokenRow)]
        scored = iter(self._score_rows(readable))
        return [next(scored) if isinstance(row, TokenRow) else row for row in rows]

    def _score_rows(self, rows: Sequence[TokenRow]) -> list[list[float] | str]:
        if not rows:
            return []
        try:
            scores_BP, places = self._forward(rows)
        except torch.AcceleratorError as error:
            # After an error of its own a GPU refuses whatever this process asks of it.
            raise ProcessSpent(f"{self._device}: {error}") from None
        column = {place: number for number, place in enumerate(places)}
        return [
            _checked([scores[column[place]] for place in row.places])
            for scores, row in zip(scores_BP.tolist(), rows, strict=True)
        ]

    @torch.inference_mode()
    def _forward(self, rows: Sequence[TokenRow]) -> tuple[Tensor, list[int]]:
        """[B, P] float64: the score at each place that some row has, and the places."""
        length = max(len(row.ids) for row in rows)
        ids_BT = torch.full((len(rows), length), self._input.pad_id)
        seen_BT = torch.zeros_like(ids_BT)
        for number, row in enumerate(rows):
            ids_BT[number, : len(row.ids)] = torch.tensor(row.ids)
            seen_BT[number, : len(row.ids)] = 1
        places = sorted({place for row in rows for place in row.places})
        place_P = torch.tensor(places, device=self._device)
        kept = {"logits_to_keep": place_P} if self._keeps_places else {}
        inputs = {"input_ids": ids_BT.to(self._device), "attention_mask": seen_BT.to(self._device)}
        logits = self._model(**inputs, **kept).logits
        logits_BPV = logits if self._keeps_places else logits[:, place_P]
        logits_BPL = logits_BPV[..., self._input.columns].double()
        return logits_BPL.softmax(-1)[..., 0].cpu(), places


def load_model(config: HfPrm) -> Any:
    """The model on its device; ValueError where the directory lacks some of its weights."""
    disable_progress_bar()
    model, found = MODELS[config.head].from_pretrained(
        config.model,
        dtype=config.dtype,
        local_files_only=True,
        output_loading_info=True,
    )
    missing = sorted([*found["missing_keys"], *found["mismatched_keys"]])
    if missing:
        raise ValueError(
            f"{config.model} has no weights for {', '.join(map(str, missing[:4]))}: its scores "
            f"would be random; is it a model for head = {config.head!r}?"
        )
    return model.to(config.device).eval()


def _checked(scores: list[float]) -> list[float] | str:
    try:
        return read_scores(scores, len(scores))
    except ValueError as error:
        return str(error)
