import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_credit.credit.step_spans import step_ids, step_texts


@pytest.mark.parametrize(
    ("texts", "separator", "ids"),
    [
        (["a", " b", "\n", "c", "\n", "d"], "\n", [0, 0, 0, 1, 1, 2]),
        (["6", "+", "7", "=", "13", ";", "<answer>", "13"], ";", [0, 0, 0, 0, 0, 0, 1, 1]),
        (["no", " line"], "\n", [0, 0]),
        (["a", "\n", "\n", "\n\n", "b"], "\n", [0, 0, 0, 0, 1]),  # a run ends one step
        (["\n", "\n", "a", "\n", "b"], "\n", [0, 0, 0, 0, 1]),  # and in front it ends none
        (["a", "\n", "  ", "\n", "b"], "\n", [0, 0, 0, 0, 1]),  # white space is no step
        (["a", "\n", " ", "b"], "\n", [0, 0, 1, 1]),  # but an indent is part of one
        (["a", "\n", "\n", " "], "\n", [0, 0, 0, 0]),
        (["\n", "\n"], "\n", [0, 0]),
        (["a\nb", "c", "\n", "d"], "\n", [0, 1, 1, 2]),  # goes with the step that it ends
        (["a\nb\nc", "d"], "\n", [0, 1]),  # ends two: no step is left without tokens
        (["a", "\n", "", "b", "", "\n", ""], "\n", [0, 0, 1, 1, 1, 1, 1]),  # no text: with the next
        (["a", "\n", "b"], "\n\n", [0, 0, 0]),
        (["a", "\n", "\n", "b"], "\n\n", [0, 0, 0, 1]),  # a separator of two tokens
        (["a", ".*", "b"], ".*", [0, 0, 1]),
        (["", ""], "\n", [0, 0]),
        ([], "\n", []),
    ],
)
def test_step_ids(texts, separator, ids):
    assert step_ids(texts, separator=separator) == ids


def test_step_texts():
    texts = ["6+0", "=6", ";", ";", "6-1=5;", "<answer>", "5"]
    ids = step_ids(texts, separator=";")
    assert step_texts(texts, ids) == ["6+0=6;;", "6-1=5;", "<answer>5"]
    assert step_texts([], []) == []


def test_what_is_no_separator_and_no_pair_is_refused():
    with pytest.raises(ValueError, match="separator is empty"):
        step_ids(["a"], separator="")
    with pytest.raises(ValueError, match="2 token texts came with 1 step ids"):
        step_texts(["a", "b"], [0])


STEPS = st.lists(st.text("ab.", min_size=1, max_size=6), min_size=1, max_size=5)
RUNS = st.lists(st.sampled_from(["\n", "\n\n", "\n \n"]), min_size=5, max_size=5)


@given(STEPS, RUNS, st.booleans(), st.lists(st.integers(1, 4), max_size=40))
def test_joined_steps_are_found_again(steps, runs, ends, sizes):
    pieces = [step + run for step, run in zip(steps, runs, strict=False)]
    if not ends:
        pieces[-1] = steps[-1]
    # One token a character: each is exactly in its step.
    letters = list("".join(pieces))
    assert step_texts(letters, step_ids(letters)) == pieces
    # Tokens of any length: each has the step of its first character, numbered without gaps.
    owner = [number for number, piece in enumerate(pieces) for _ in piece]
    text, texts, firsts = "".join(pieces), [], []
    while text:
        size = sizes.pop() if sizes else 1
        firsts.append(owner[-len(text)])
        texts, text = [*texts, text[:size]], text[size:]
    rank = {step: number for number, step in enumerate(sorted(set(firsts)))}
    assert step_ids(texts) == [rank[step] for step in firsts]
