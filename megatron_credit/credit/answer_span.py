"""Which tokens of a response spell its boxed answer."""

import re
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Literal

# The verifiers read the same boxes.
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)

Box = Literal["last", "first"]


class AnswerPart(IntEnum):
    """What a token is to the boxed answer, as in `Group.answer_part_NT`."""

    NONE = 0
    MARKER = 1
    CONTENT = 2
    CLOSE = 3
    AFTER = 4


def answer_parts(texts: Sequence[str], *, box: Box = "last") -> list[int]:
    r"""The part that each token of the response plays, given the tokens' texts.

    The answer is the last or first complete \boxed{..}: escaped braces do not count, the others are
    balanced. A token that overlaps the content is content, else marker before closing brace; all
    are NONE where no box is complete. A token without a text of its own, such as the first bytes of
    a character, goes with what follows it.
    """
    spans = list(_boxes("".join(texts)))
    if not spans:
        return [int(AnswerPart.NONE)] * len(texts)
    span = min(spans) if box == "first" else max(spans, key=lambda each: each[2])
    parts, start = [], 0
    for text in texts:
        stop = start + len(text)
        parts.append(int(_part(start, max(stop, start + 1), span)))
        start = stop
    return parts


def _part(start: int, stop: int, span: tuple[int, int, int]) -> AnswerPart:
    """The part of the characters from start up to stop."""
    marker, content, close = span
    if max(start, content) < min(stop, close):
        return AnswerPart.CONTENT
    if max(start, marker) < min(stop, content):
        return AnswerPart.MARKER
    if start <= close < stop:
        return AnswerPart.CLOSE
    return AnswerPart.AFTER if start > close else AnswerPart.NONE


def _boxes(text: str) -> Iterator[tuple[int, int, int]]:
    """Where the marker, the content and the closing brace of each complete box start."""
    closing = _closing_braces(text)
    for match in _BOX.finditer(text):
        if match.end() in closing:
            yield match.start(), match.end() + 1, closing[match.end()]


def _closing_braces(text: str) -> dict[int, int]:
    """Where each opening brace is closed, of those that are."""
    closing, opened = {}, []
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            closing[opened.pop()] = match.start()
    return closing
