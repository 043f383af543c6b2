"""The contexts that teachers read a rollout behind, as token ids in the model's chat template."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from megatron_credit.batch.evidence_text import (
    answer_below,
    bare_answer,
    solution_below,
    system_solution,
)
from megatron_credit.batch.rollout import Prompt, Rollout
from megatron_credit.data.chat import encode_prompt

CUT = " ... "
"""Stands where the middle of a long text was taken out."""
Place = Literal["system", "user", "answer_bare", "answer_wrapped"]


@dataclass(frozen=True)
class Context:
    """A prompt with evidence in it."""

    prompt_ids: list[int]
    evidence: str
    """The text that was put in, as it stands there."""
    is_cut: bool


@dataclass(frozen=True)
class ContextWriter:
    """Puts evidence into prompts; what is too long is cut in its middle, nothing else is."""

    tokenizer: PreTrainedTokenizerBase
    max_positions: int
    """Tokens that the model can read, response included."""

    def write(self, rollout: Rollout, text: str, place: Place) -> Context | None:
        """The rollout's prompt with the text in this place; None where there is no room for it.

        ValueError where the record of the rollout has no messages to put it into.
        """
        if place == "answer_bare":
            # The published form: nothing of the prompt is rendered again.
            return self._fitted(rollout, text, lambda part: self._behind_header(rollout, part))
        if not rollout.messages:
            raise ValueError(
                f"rollout {rollout.sample} of {rollout.prompt_id} was recorded without the "
                "prompt's messages, so no evidence can be put among them; sample it again"
            )
        return self._fitted(rollout, text, lambda part: self._rendered(rollout, part, place))

    def _behind_header(self, rollout: Rollout, text: str) -> list[int]:
        return [*rollout.prompt_ids, *self._encode(bare_answer(text))]

    def _rendered(self, rollout: Rollout, text: str, place: Place) -> list[int]:
        prompt = Prompt(
            id=rollout.prompt_id,
            messages=_with_evidence(rollout.messages, text, place),
            answer=rollout.answer,
            template_options=rollout.template_options,
        )
        return encode_prompt(self.tokenizer, prompt)

    def _fitted(
        self, rollout: Rollout, text: str, render: Callable[[str], list[int]]
    ) -> Context | None:
        room = self.max_positions - len(rollout.response_ids)
        context = Context(render(text), text, is_cut=False)
        ids = self._encode(text)
        kept = len(ids)
        # What the mark costs, and a cut that takes more tokens to spell, shows in the next round.
        while (excess := len(context.prompt_ids) - room) > 0:
            kept -= excess
            if kept < 2:
                return None
            shown = self._decode(ids[: (kept + 1) // 2]) + CUT + self._decode(ids[-(kept // 2) :])
            context = Context(render(shown), shown, is_cut=True)
        return context

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))


def _with_evidence(messages: list[dict[str, str]], text: str, place: Place) -> list[dict[str, str]]:
    """The chat with the text in its system turn or in its last user turn."""
    if place == "system":
        stated = messages[0]["role"] == "system"
        words = [messages[0]["content"]] if stated else []
        content = "\n\n".join([*words, system_solution(text)])
        return [{"role": "system", "content": content}, *messages[1 if stated else 0 :]]
    last = max(at for at, message in enumerate(messages) if message["role"] == "user")
    below = solution_below if place == "user" else answer_below
    changed = messages[last] | {"content": below(messages[last]["content"], text)}
    return [*messages[:last], changed, *messages[last + 1 :]]
