"""The shipped models' tokenizers: one token a digit, one for each sentence that never varies.

A question of four terms is 11 tokens. Answer tags are ordinary added tokens, so decoding with
`skip_special_tokens=True` keeps them.
"""

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megatron_credit.batch.evidence_text import ANSWER_IS, GUIDE, RETRY
from megatron_credit.rewards.answer_tags import CLOSE_TAG, OPEN_TAG
from megatron_credit.tasks.solver import ASK_FOR_BOX, OPEN_BOX

PAD, END, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"
SYSTEM = "<|system|>"
"""Only the credit model's tokenizer has it."""
PAD_ID, END_ID = 0, 1
QUESTION_OPENING = "State the final answer to the following arithmetic problem:"
VOCAB_SIZE = 384
"""Rows of the model's embedding: 3 * 128, so that tensor parallel ranks need no padding."""
MAX_LENGTH = 512
CREDIT_MAX_LENGTH = 1024
"""Tokens of the longest context of the credit model: a question, evidence and several attempts."""

# A number's digits and the operators stay single; any other run of text may become one token.
_PIECES = r" ?[0-9]| ?[-+*/=;]|[^0-9+*/=;-]+(?<! )"

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer(questions: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer whose merges come from `questions` and the retry sentence."""
    return _build(
        corpus=[*questions, RETRY, RETRY],
        special_tokens=[PAD, END, USER, ASSISTANT],
        whole_tokens=[OPEN_TAG, CLOSE_TAG],
        max_length=MAX_LENGTH,
    )


def build_credit_tokenizer() -> PreTrainedTokenizerFast:
    """The same with a system turn, and one token for each sentence around evidence and boxes.

    The sentences are added tokens: they are found whatever stands beside them.
    """
    return _build(
        corpus=[f" {piece}" for piece in (*range(10), *"+-=")],
        special_tokens=[PAD, END, USER, ASSISTANT, SYSTEM],
        whole_tokens=[
            *(QUESTION_OPENING, RETRY, GUIDE, ANSWER_IS, ASK_FOR_BOX),
            *(OPEN_TAG, CLOSE_TAG, OPEN_BOX),
        ],
        max_length=CREDIT_MAX_LENGTH,
    )


def _build(
    *, corpus: list[str], special_tokens: list[str], whole_tokens: list[str], max_length: int
) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(whole_tokens),
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_tokens([AddedToken(token, special=False) for token in whole_tokens])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=special_tokens[2:],
        model_max_length=max_length,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = _CHAT_TEMPLATE
    return wrapped
