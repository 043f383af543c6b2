"""The shipped model's tokenizer: one token a digit, one token for each sentence that never varies.

A question of four terms is 11 tokens. Answer tags are ordinary added tokens, so decoding with
`skip_special_tokens=True` keeps them.
"""

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megatron_credit.rewards.answer_tags import CLOSE_TAG, OPEN_TAG

PAD, END, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"
PAD_ID, END_ID = 0, 1
RETRY = "Wrong, try again."
"""What the user says after a wrong attempt."""
VOCAB_SIZE = 384
"""Rows of the model's embedding: 3 * 128, so that tensor parallel ranks need no padding."""
MAX_LENGTH = 512

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
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 2,
        special_tokens=[PAD, END, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*questions, RETRY, RETRY], trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False) for tag in (OPEN_TAG, CLOSE_TAG)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        model_max_length=MAX_LENGTH,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = _CHAT_TEMPLATE
    return wrapped
