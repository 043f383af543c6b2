"""How a Hugging Face process reward model reads a response. T = tokens, S = steps."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

from megatron_credit.rewards.prm.config import HfPrm
from megatron_credit.rewards.prm.steps import StepItem

ARCHITECTURES = {
    "tokens": MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "causal": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
}


@dataclass(frozen=True)
class TokenRow:
    """A response as the model reads it."""

    ids: list[int]
    """[T] token ids."""
    places: list[int]
    """[S] the token at which each step's score is read."""


class HfInput:
    """What is known of a model without its weights; raises ValueError where it cannot work."""

    def __init__(self, config: HfPrm) -> None:
        if not (config.model / "config.json").is_file():
            raise ValueError(
                f"model = {str(config.model)!r} has no config.json; name the directory of a model "
                "in the Hugging Face format (nothing is downloaded)"
            )
        check_device(config.device)
        self._config = config
        self._model_config = AutoConfig.from_pretrained(config.model, local_files_only=True)
        self._check_architecture()
        self._tokenizer = AutoTokenizer.from_pretrained(config.model, local_files_only=True)
        self._step_end = [self._token(config.step_token, "step_token")] if config.step_token else []
        self.columns = self._columns()
        """The logits that make the score; the first one means a good step."""
        self.pad_id: int = self._tokenizer.pad_token_id or 0
        if config.chat_template and not self._tokenizer.chat_template:
            raise ValueError(f"{config.model} has no chat template; set chat_template = false")

    def row(self, item: StepItem) -> TokenRow | str:
        """The prompt and its steps in tokens, or why the model cannot read them.

        The prompt and each step are encoded apart, so that no token belongs to two steps.
        """
        ids, places = self._prompt_ids(item.prompt), []
        for number, step in enumerate(item.steps):
            step_ids = [*self._encode(self._shown(step)), *self._step_end]
            if not step_ids:
                return f"step {number} has no token"
            ids += step_ids
            places.append(len(ids) - 1)
        limit = self._config.max_tokens
        if len(ids) > limit:
            return f"it has {len(ids)} tokens, max_tokens = {limit}"
        return TokenRow(ids, places)

    def _prompt_ids(self, prompt: str) -> list[int]:
        """With what the tokenizer puts in front of a text (BOS, [CLS]), not what it puts behind."""
        if self._config.chat_template:
            messages = [{"role": "user", "content": prompt}]
            return self._encode(
                self._tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True
                )
            )
        bare = self._encode(prompt)
        whole = self._tokenizer.encode(prompt)
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return whole[: start + len(bare)]
        return bare

    def _shown(self, step: str) -> str:
        if self._config.keep_separator:
            return step
        shown = step
        while shown.endswith(self._config.step_separator):
            shown = shown.removesuffix(self._config.step_separator)
        return shown

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _check_architecture(self) -> None:
        config, wanted = self._config, set[str]()
        for names in ARCHITECTURES[config.head].values():
            wanted.update([names] if isinstance(names, str) else names)
        found = self._model_config.architectures or []
        if not wanted.intersection(found):
            kind = {"tokens": "token classification", "causal": "causal language"}[config.head]
            raise ValueError(
                f"{config.model} is a {', '.join(found) or 'model of no known architecture'}, but "
                f"head = {config.head!r} reads a {kind} model; choose the head it was trained with"
            )
        positions = _positions(self._model_config)
        if positions is not None and config.max_tokens > positions:
            raise ValueError(
                f"max_tokens = {config.max_tokens}, but {config.model} reads at most {positions} "
                f"tokens; use max_tokens = {positions}"
            )

    def _columns(self) -> list[int]:
        config = self._config
        if config.head == "causal":
            return [
                self._token(config.good_token, "good_token"),
                self._token(config.bad_token, "bad_token"),
            ]
        labels = self._model_config.id2label or {}
        if not config.good_label < len(labels) > 1:
            raise ValueError(
                f"good_label = {config.good_label}, but {config.model} has the labels {labels}; it "
                "takes at least two, and the number of one of them"
            )
        others = [label for label in range(len(labels)) if label != config.good_label]
        return [config.good_label, *others]

    def _token(self, text: str, option: str) -> int:
        """The id of a token that is written as in the vocabulary, or of a text that is one."""
        vocabulary = self._tokenizer.get_vocab()
        if text in vocabulary:
            return vocabulary[text]
        ids = self._encode(text)
        if len(ids) != 1 or ids[0] == self._tokenizer.unk_token_id:
            raise ValueError(
                f"{option} = {text!r} is no single token of {self._config.model} but "
                f"{self._tokenizer.convert_ids_to_tokens(ids)}; use a token that the model was "
                "trained with, as it stands in the vocabulary"
            )
        return ids[0]


def check_device(device: str) -> None:
    """ValueError where this machine has no such GPU."""
    number = device.removeprefix("cuda:")
    if number != device and int(number) >= torch.cuda.device_count():
        raise ValueError(
            f"device = {device!r}, but this process sees {torch.cuda.device_count()} GPUs; use "
            "'cpu' or a number below that"
        )


def _positions(model_config: Any) -> int | None:
    """Most tokens that the model's positions allow; None: it does not say."""
    if not hasattr(model_config, "max_position_embeddings"):
        return None
    return model_config.max_position_embeddings
