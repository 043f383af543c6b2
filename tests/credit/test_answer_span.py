"""Answer parts of tokens: literal cases, and any cut of a text against its characters."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_credit.credit.answer_span import answer_parts


@pytest.mark.parametrize(
    ("texts", "parts"),
    [
        (["so ", r"\boxed{", "1", "2", "}", "."], [0, 1, 2, 2, 3, 4]),
        # Content wins over marker, brace and what stands around; marker over what stands before.
        (["so \\", "boxed", "{1", "2}", " end"], [1, 1, 2, 2, 4]),
        ([r"so \boxed{12}."], [2]),
        (["so", r" \boxed{", "12", "}.", "\n"], [0, 1, 2, 3, 4]),
        # An empty box has a marker and a brace, and the marker wins.
        ([r"\boxed{", "}", "!"], [1, 3, 4]),
        ([r"\boxed{}", "!"], [1, 4]),
        # Braces are balanced, escaped ones are none.
        ([r"\boxed{", r"\frac{1}", "{2}", "}"], [1, 2, 2, 3]),
        ([r"\boxed{", r"\}", "1", r"\{", "}"], [1, 2, 2, 2, 3]),
        ([r"\boxed {", "1", "}", "}"], [1, 2, 3, 4]),
        # No complete box.
        ([r"\boxed{", "1"], [0, 0]),
        (["boxed{", "1", "}"], [0, 0, 0]),
        ([r"\boxed 5"], [0]),
        ([], []),
    ],
)
def test_parts_by_hand(texts, parts):
    assert answer_parts(texts) == parts
    assert answer_parts(texts, box="first") == parts


def test_last_and_first_of_several_boxes():
    texts = [r"\boxed{", "1", "}", " or ", r"\boxed{", "2", "}", r" \boxed{", "3"]
    assert answer_parts(texts) == [0, 0, 0, 0, 1, 2, 3, 4, 4]
    assert answer_parts(texts, box="first") == [1, 2, 3, 4, 4, 4, 4, 4, 4]


def test_of_nested_boxes_the_outer_one_unless_it_is_open():
    nested = [r"\boxed{", r"\boxed{", "1", "}", "}"]
    assert answer_parts(nested) == [1, 2, 2, 2, 3]
    assert answer_parts(nested[:4]) == [0, 1, 2, 3]


def test_tokens_without_a_text_go_with_what_follows():
    texts = ["", r"\boxed{", "", "", "é", "", "}", "", "."]
    assert answer_parts(texts) == [1, 1, 2, 2, 2, 3, 3, 4, 4]


@given(st.lists(st.integers(0, 30), max_size=12))
def test_any_cut_of_a_text_follows_its_characters(cuts):
    text = r"no \boxed{9} or \boxed{3{x}4}! "
    character_parts = "0" * 16 + "1" * 7 + "2" * 5 + "3" + "4" * 2
    assert len(character_parts) == len(text) == 31
    places = sorted({0, len(text), *cuts})
    spans = list(pairwise(places))
    # The order in which the parts of its characters claim a token.
    expected = [
        next(int(part) for part in "21340" if part in character_parts[slice(*span)])
        for span in spans
    ]
    assert answer_parts([text[slice(*span)] for span in spans]) == expected


def test_time_is_linear_in_the_text():
    # Quadratic time would take minutes here.
    texts = [r"\boxed{"] * 100_000 + ["}"] * 99_999
    assert answer_parts(texts)[:3] == [0, 1, 2]
