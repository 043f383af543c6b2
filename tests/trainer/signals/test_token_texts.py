"""Texts of single tokens, and what is found by them."""

import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PythonBackend

from megatron_credit.trainer.signals.saliency import thinking_tokens
from megatron_credit.trainer.signals.shared import padded, padded_floats, spans_of
from megatron_credit.trainer.signals.token_texts import token_texts

MODEL = Path(__file__).parents[3] / "models" / "chain-sum-0.6m"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_characters_of_several_tokens_count_for_the_last(tokenizer):
    ids = ids_of(tokenizer, "a \u00e9\u20ac<answer>5</answer>\u65e5")
    texts = token_texts(tokenizer, ids)
    assert texts == [
        *("a", " ", "", "\u00e9", "", "", "\u20ac"),
        *("<answer>", "5", "</answer>", "", "", "\u65e5"),
    ]


def test_only_the_special_token_that_ends_it_has_no_text(tokenizer):
    """As in the text of the rollout's record."""
    ids = ids_of(tokenizer, "8<|end|><|user|>9<|end|>")
    assert token_texts(tokenizer, ids) == ["8", "<|end|>", "<|user|>", "9", ""]
    assert token_texts(tokenizer, ids[:-1]) == ["8", "<|end|>", "<|user|>", "9"]
    assert token_texts(tokenizer, []) == []


def test_any_tokens_have_texts_that_make_up_the_whole(tokenizer):
    """Bytes that are no characters too; those of an unfinished one at the end are left out."""
    generator = random.Random(4)
    for _ in range(200):
        ids = [generator.randrange(len(tokenizer)) for _ in range(40)]
        texts = token_texts(tokenizer, ids)
        assert len(texts) == 40
        ended = ids[-1] in tokenizer.all_special_ids
        whole = tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False)
        joined = "".join(texts)
        assert whole.startswith(joined)
        assert set(whole[len(joined) :]) <= {"\ufffd"}


def test_a_slow_tokenizer_is_refused():
    class Slow(PythonBackend):
        def __init__(self):
            pass

    with pytest.raises(ValueError, match="is a Slow, which cannot tell the text of single tokens"):
        token_texts(Slow(), [1])


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["a", "b"], 0),
        (["<think>", "x", "</think>", "\n", "5"], 3),
        (["x", "</thi", "nk> 5", "6"], 3),
        (["</think>", "y", "</think>", "5"], 3),
        (["x", "</think>"], 2),
        ([], 0),
    ],
)
def test_tokens_of_the_thinking(texts, expected):
    """Up to the last end of it."""
    assert thinking_tokens(texts) == expected


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([], []),
        ([-1, -1], []),
        ([0, 0, 1, -1, -1, 2], [(0, 2), (2, 3), (5, 6)]),
        ([3], [(0, 1)]),
        ([-1, 0, -1, 0], [(1, 2), (3, 4)]),
    ],
)
def test_spans_of_equal_ids(ids, expected):
    assert spans_of(ids) == expected


def test_padding():
    assert padded([[1], [2, 3]], -1).tolist() == [[1, -1], [2, 3]]
    found = padded_floats([[0.5], [0.25, 1.0]])
    assert str(found.tolist()) == "[[0.5, nan], [0.25, 1.0]]"
