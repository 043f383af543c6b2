"""Prompts in the tokenizer's chat template."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_credit.batch.rollout import Prompt
from megatron_credit.data.problems import RowProblem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THINKING_OPTION = "enable_thinking"
Messages = list[dict[str, str]]


def encode_prompt(tokenizer: "PreTrainedTokenizerBase", prompt: Prompt) -> list[int]:
    """Token ids of the prompt in the tokenizer's chat template, ready for the assistant's turn."""
    # its result has as many types as it has options, and these give a list of ids
    return tokenizer.apply_chat_template(  # pyright: ignore[reportReturnType]
        prompt.messages,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
        **prompt.template_options,
    )


def template_options(
    tokenizer: "PreTrainedTokenizerBase", thinking: bool | None
) -> dict[str, bool]:
    """The options for `apply_chat_template`; raises ValueError where the template has no such mode.

    A template ignores the options it does not know, so this looks whether it mentions this one.
    """
    try:
        template = tokenizer.get_chat_template()
    except ValueError:
        raise ValueError(
            "the tokenizer has no chat template, so prompts cannot be put into the form the model "
            "was trained on; add chat_template.jinja to the model's directory"
        ) from None
    if thinking is None:
        return {}
    if THINKING_OPTION not in template:
        raise ValueError(
            f"data.thinking = {str(thinking).lower()}, but the model's chat template has no "
            f"{THINKING_OPTION}, so it cannot turn thinking on or off; leave data.thinking out"
        )
    return {THINKING_OPTION: thinking}


def prompt_lengths(
    tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[Messages], options: dict[str, bool]
) -> list[int | RowProblem]:
    """Tokens of each prompt as `encode_prompt` makes it, or why the template does not take it."""
    rendered = render(tokenizer, prompts, options)
    texts = [text for text in rendered if isinstance(text, str)]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    lengths = iter(map(len, encoded))
    return [next(lengths) if isinstance(text, str) else text for text in rendered]


def render(
    tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[Messages], options: dict[str, Any]
) -> list[str | RowProblem]:
    """The text of each prompt in the chat template, or why the template does not take it."""
    from jinja2 import TemplateError

    rendered: list[str | RowProblem] = []
    for messages in prompts:
        try:
            text = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False, **options
            )
        except TemplateError as error:
            rendered.append(RowProblem("refused by the chat template", str(error)))
        else:
            rendered.append(str(text))
    return rendered
