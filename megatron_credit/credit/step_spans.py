"""Where a response is cut into reasoning steps (VeriGate and its baselines)."""

import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise


def step_ids(texts: Sequence[str], *, separator: str = "\n") -> list[int]:
    """The step of each token of one response, counted from 0 without gaps.

    `texts` are the tokens' texts. A step ends behind its separator; what follows the last separator
    is a step too. White space alone is no step: it belongs to the step before it, or to the first,
    so a run of separators ends one step. A token belongs to the step of its first character: one
    with a separator in its middle, to the step that it ends. A token without text goes with what
    follows it, at the end with what is before it. ValueError where the separator is empty.
    """
    if not separator:
        raise ValueError("the step separator is empty; use '\\n' for steps of one line")
    stops = _step_stops("".join(texts), separator)
    ends = accumulate(map(len, texts))
    starts = [end - len(text) for end, text in zip(ends, texts, strict=True)]
    found = [min(bisect_right(stops, start), len(stops) - 1) for start in starts]
    # A token that ends two steps takes the second one's place.
    numbers = {step: number for number, step in enumerate(dict.fromkeys(found))}
    return [numbers[step] for step in found]


def step_texts(texts: Sequence[str], ids: Sequence[int]) -> list[str]:
    """The text of each step, with the separator that ends it; together they are the response.

    `ids` are those of `step_ids`. ValueError where the two differ in length.
    """
    if len(texts) != len(ids):
        raise ValueError(f"{len(texts)} token texts came with {len(ids)} step ids")
    found = [""] * (max(ids, default=-1) + 1)
    for text, step in zip(texts, ids, strict=True):
        found[step] += text
    return found


def _step_stops(text: str, separator: str) -> list[int]:
    """Where each step stops, as a number of characters; at least one step."""
    ends = (match.end() for match in re.finditer(re.escape(separator), text))
    stops: list[int] = []
    for start, stop in pairwise(chain([0], ends, [len(text)])):
        if text[start:stop].removesuffix(separator).strip():
            stops.append(stop)
        elif stops:
            stops[-1] = stop
    return stops or [len(text)]
