"""The text that each token of a response stands for."""

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """A text for each token; joined they are the response's text. A special token that ends it, as
    the end of the turn does, has none.

    The bytes of a character that takes several tokens count for the last of them, the others have
    no text. ValueError for a tokenizer that has no fast implementation.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(
            f"the tokenizer is a {type(tokenizer).__name__}, which cannot tell the text of single "
            "tokens; save it in the fast format, as tokenizer.json"
        )
    stream = DecodeStream(skip_special_tokens=False)
    texts = [stream.step(tokenizer.backend_tokenizer, token) or "" for token in ids]
    if ids and ids[-1] in tokenizer.all_special_ids:
        texts[-1] = ""
    return texts
