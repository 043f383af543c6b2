"""Where chains of thought are cut: literal cases of each segmenter, bounds on any text."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_credit.credit.segments import Segmenter, group_segment_ids, segment_ids

NAN = math.nan


def cut(texts, entropies=None, **options):
    """The texts of the segments, for segments of any length unless said otherwise."""
    entropies = [0.0] * len(texts) if entropies is None else entropies
    ids = segment_ids(texts, entropies, Segmenter(**({"min_tokens": 1} | options)))
    pieces = [""] * (max(ids, default=-1) + 1)
    for text, segment in zip(texts, ids, strict=True):
        pieces[segment] += text
    return pieces


@pytest.mark.parametrize(
    ("texts", "pieces"),
    [
        # Sentences that start with a marker; not markers within a sentence, nor longer words.
        (["It is 3", ".", " Wait", ", no.", " But", " 4"], ["It is 3.", " Wait, no.", " But 4"]),
        (["I say", " Wait", ". Nowhere. ", "Sofa", "! (", "Let", ")"], None),
        (['He said "3."', "  ", "Therefore", " 3"], ['He said "3."  ', "Therefore 3"]),
        # Newlines and blank lines; a token with text on both sides of the cut begins the segment.
        (["a", "\n", "b", "\n\n", "c"], ["a\n", "b\n\n", "c"]),
        (["a", "b.\n\n", "c"], ["ab.\n\n", "c"]),
        (["a", "b\nc", "d"], ["a", "b\ncd"]),
        # Neither at the very start nor at the very end.
        (["\n", "Wait", " a", "\n"], ["\n", "Wait a\n"]),
        (["Wait", " a"], ["Wait a"]),
        ([], []),
    ],
)
def test_hybrid_cuts_by_text(texts, pieces):
    assert cut(texts) == (["".join(texts)] if pieces is None else pieces)


MARKERS = "Wait But So Therefore Thus Alternatively However First Next Then Now Let"


@pytest.mark.parametrize("marker", MARKERS.split(" "))
def test_every_marker(marker):
    assert cut(["a. ", marker, " b"]) == ["a. ", f"{marker} b"]
    assert cut(["a", "\n", f"  {marker}", " b"])[-1] == f"  {marker} b"


# Of twenty values the 95th percentile lies between the largest two, 0.5 and 2.
PEAK = [0.1] * 5 + [0.5] + [0.1] * 6 + [2.0] + [0.1] * 7
LETTERS = list("abcdefghijklmnopqrst")


def test_cuts_at_peaks_of_entropy_above_the_95th_percentile():
    for kind in ("hybrid", "entropy"):
        assert cut(LETTERS, PEAK, kind=kind) == ["abcdefghijkl", "mnopqrst"]
    assert len(cut(LETTERS, PEAK, kind="newline")) == 1
    # The second peak of 40 values is above the percentile, its neighbour is no local maximum.
    two = [0.1] * 40
    two[10], two[11], two[30] = 2.0, 1.9, 3.0
    assert [len(piece) for piece in cut(LETTERS * 2, two, kind="entropy")] == [10, 20, 10]
    # Of a plateau the start; unknown entropies are neither peaks nor part of the percentile.
    flat = [NAN] * 5 + [0.1] * 33 + [2.0, 2.0]
    assert [len(piece) for piece in cut(LETTERS * 2, flat, kind="entropy")] == [38, 2]
    assert len(cut(LETTERS, [NAN] * 20, kind="entropy")) == 1
    # Peaks so common that they are the percentile are not above it.
    assert len(cut(LETTERS, [0.1, 2.0, 0.1, 2.0, 0.1] * 4, kind="entropy")) == 1


def test_newline_and_entropy_ignore_the_rest():
    texts = ["a. ", "Wait", "\n", "b. ", "So"]
    assert cut(texts, kind="newline") == ["a. Wait\n", "b. So"]
    assert cut(texts, [0.1, 0.2, 0.1, 0.1, 0.1], kind="entropy") == ["a. ", "Wait\nb. So"]


def test_fixed_segments_are_even():
    assert [len(piece) for piece in cut(LETTERS, kind="fixed", min_tokens=6)] == [6, 7, 7]
    assert [len(piece) for piece in cut(LETTERS, kind="fixed", max_segments=2)] == [10, 10]
    assert cut(["a", "b"], kind="fixed", min_tokens=3) == ["ab"]
    assert cut([], kind="fixed") == []


def test_short_segments_are_merged():
    lines = ["a\n", "b\n", "c\n", "d\n", "e"]
    # The first is short and joins the next; so does the third, the last joins the one before.
    assert cut(lines, min_tokens=2) == ["a\nb\n", "c\nd\ne"]
    assert cut(lines, min_tokens=3) == ["a\nb\nc\nd\ne"]


def test_the_cuts_of_highest_entropy_are_kept():
    lines = ["a\n", "b\n", "c\n", "d\n", "e"]
    entropies = [9.0, 0.2, 0.4, NAN, 0.3]
    kept = {1: ["a\nb\nc\nd\ne"], 2: ["a\nb\n", "c\nd\ne"], 3: ["a\nb\n", "c\nd\n", "e"]}
    for count, pieces in kept.items():
        assert cut(lines, entropies, kind="newline", max_segments=count) == pieces
    assert cut(lines, kind="newline", max_segments=3) == ["a\n", "b\n", "c\nd\ne"]


pieces_of_text = st.sampled_from(["a", " b", ".", "\n", "\n\n", " Wait", "So", "", ". "])


@given(
    st.lists(st.tuples(pieces_of_text, st.sampled_from([NAN, 0.0, 0.5, 1.0, 3.0])), max_size=60),
    st.sampled_from(["hybrid", "newline", "fixed", "entropy"]),
    st.integers(1, 6),
    st.integers(1, 5),
)
def test_segments_are_consecutive_long_enough_and_few(tokens, kind, min_tokens, max_segments):
    texts, entropies = [text for text, _ in tokens], [entropy for _, entropy in tokens]
    segmenter = Segmenter(kind=kind, min_tokens=min_tokens, max_segments=max_segments)
    ids = segment_ids(texts, entropies, segmenter)
    assert len(ids) == len(texts) and ids == sorted(ids)
    counts = [ids.count(segment) for segment in range(max(ids, default=-1) + 1)]
    assert len(counts) <= max_segments
    assert all(count >= min(min_tokens, len(texts)) for count in counts)


def test_texts_and_entropies_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match="2 token texts came with 1 entropies"):
        segment_ids(["a", "b"], [0.1], Segmenter())


def test_time_is_linear_in_a_text_of_blanks():
    # Quadratic time would take minutes here.
    for blank in ("\n", " ", ". "):
        assert segment_ids([blank] * 200_000, [0.1] * 200_000, Segmenter())[-1] <= 15


def test_ids_of_a_group_number_the_answer_after_the_longest_chain():
    id_NT, most = group_segment_ids([[0, 0, 1], [0], []], [5, 1, 2])
    assert most == 2
    expected = [[0, 0, 1, 2, 2], [0, -1, -1, -1, -1], [2, 2, -1, -1, -1]]
    assert torch.equal(id_NT, torch.tensor(expected))
    id_NT, most = group_segment_ids([[], []], [1, 0])
    assert most == 0 and id_NT.tolist() == [[0], [-1]]
