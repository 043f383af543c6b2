"""The tokens between a failed attempt and the next one, as the model's chat template has them.

A further attempt goes on in token ids: what was sampled is never decoded and tokenised again. The
template describes the same conversation only where it shows earlier turns as they were sampled.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from megatron_credit.batch.rollout import Prompt

PROBES = ("7", "<think>\n3 + 4\n</think>\n\n7")
"""Answers that a template must show unchanged once they are an earlier turn."""
SHOWN = 40
"""Characters of a rendered conversation in an error."""


class FeedbackTurn(NamedTuple):
    """What follows an answer that failed."""

    end_id: int
    """The stop token that closes the assistant's turn; an answer that ended by another one has no
    continuation in this template."""
    token_ids: list[int]
    """From behind that token up to where the next attempt begins."""


def read_feedback_turn(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    feedback: str,
    stop_token_ids: Sequence[int],
) -> FeedbackTurn:
    """The turn with this feedback after an answer to the prompt.

    It is the same for all prompts with the same template options. ValueError where the template
    shows earlier turns otherwise than they were sampled, or ends them by none of the stop tokens.
    """
    asked = render(tokenizer, prompt, [])
    for answer in PROBES:
        turns = [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": feedback},
        ]
        check_unchanged(asked + answer, render(tokenizer, prompt, turns))
    shown = render(tokenizer, prompt, turns)
    sampled = asked + answer
    remaining = shown[len(sampled) :]
    end_id, end = closing_token(tokenizer, remaining, stop_token_ids)
    if feedback.strip() not in remaining:
        raise ValueError(
            f"the chat template does not show attempts.feedback = {feedback!r}: after an answer it "
            f"has {remaining!r}; change the feedback, or leave [attempts] out"
        )
    before = encode(tokenizer, sampled + end)
    everything = encode(tokenizer, shown)
    if everything[: len(before)] != before or before[-1] != end_id:
        raise ValueError(
            f"the tokenizer joins {end!r}, which ends an answer, with the text around it, so no "
            "tokens can be added behind an answer; leave [attempts] out"
        )
    return FeedbackTurn(end_id, everything[len(before) :])


def render(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, turns: list[dict[str, str]]) -> str:
    """The conversation up to where an answer begins."""
    try:
        text = tokenizer.apply_chat_template(
            prompt.messages + turns,
            add_generation_prompt=True,
            tokenize=False,
            **prompt.template_options,
        )
    except TemplateError as error:
        raise ValueError(
            f"the chat template does not take a further turn: {error}; leave [attempts] out"
        ) from None
    return str(text)


def check_unchanged(sampled: str, shown: str) -> None:
    """ValueError where the longer conversation does not begin with what was sampled."""
    if shown.startswith(sampled):
        return
    pairs = zip(sampled, shown, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    start = max(0, same - SHOWN // 2)
    raise ValueError(
        "[attempts] goes on behind the tokens that were sampled, but the chat template changes "
        f"earlier turns (some leave out earlier thinking): it makes "
        f"...{shown[start : start + SHOWN]!r} of ...{sampled[start : start + SHOWN]!r}; use a "
        "chat template that keeps earlier turns whole, or leave [attempts] out"
    )


def closing_token(
    tokenizer: PreTrainedTokenizerBase, remaining: str, stop_token_ids: Sequence[int]
) -> tuple[int, str]:
    """Id and text of the stop token that the template ends an answer by."""
    ends = {one: str(tokenizer.decode([one], skip_special_tokens=False)) for one in stop_token_ids}
    for end_id, end in ends.items():
        if end and remaining.startswith(end):
            return end_id, end
    raise ValueError(
        f"the chat template goes on with {remaining[:SHOWN]!r} after an answer, but the stop "
        f"tokens are {list(ends.values())}; name the token that ends an answer in "
        "sampling.stop_token_ids"
    )


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a rendered conversation, which has its special tokens already."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]  # pyright: ignore[reportReturnType]
