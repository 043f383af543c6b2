"""Which part of a response is its answer. Time is linear in the length of the text."""

import re
from collections.abc import Callable, Iterator

from megatron_credit.rewards.answer_tags import CLOSE_TAG, OPEN_TAG
from megatron_credit.rewards.config import AnswerPlace, AnswerSettings

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
BOX = re.compile(r"\\(?:boxed|fbox)\s*")
# Bounded blanks: time must stay linear in a text that a model wrote.
MARKER = re.compile(
    r"####|\banswer\s{0,3}(?:\*\*)?\s{0,3}(?:is\b|=|:)\s{0,3}:?(?:\s{0,3}\*\*(?=\s))?",
    re.IGNORECASE,
)


def find_answer(text: str, settings: AnswerSettings) -> str | None:
    """The stripped answer of a response; None: it holds none."""
    spoken = after_thinking(text, needed=settings.needs_think_end)
    found = FINDERS[settings.answer_in](spoken) if spoken else None
    return (found or "").strip() or None


def after_thinking(text: str, *, needed: bool) -> str:
    """What follows the last </think>; nothing while the thinking has not ended."""
    thought, end, spoken = text.rpartition(THINK_CLOSE)
    if THINK_OPEN in spoken or (needed and not end):
        return ""
    return spoken if end else thought + spoken


def last_box(text: str) -> str | None:
    r"""The content of the last balanced \boxed or \fbox; of nested ones the inner."""
    return _inside_last(text, _box_spans(text))


def last_tag(text: str) -> str | None:
    """The content of the last complete <answer>..</answer>."""
    return _inside_last(text, _tag_spans(text))


def last_marked(text: str) -> str | None:
    """The rest of the line after the last "answer is", "Answer:" or "####"; the next line where
    nothing is left of that one."""
    markers = list(MARKER.finditer(text))
    return first_line(text[markers[-1].end() :]) if markers else None


def last_line(text: str) -> str | None:
    """The last line that is not empty."""
    return text.rstrip().rpartition("\n")[2]


def first_line(text: str) -> str:
    """The first line that is not empty."""
    return text.lstrip().partition("\n")[0]


def likeliest(text: str) -> str | None:
    """The last box or tag, whichever ends later, else what is marked, else the last line."""
    spans = [*_tag_spans(text), *_box_spans(text)]
    if spans:
        found = _inside_last(text, iter(spans)) or ""
        return last_box(found) or found
    marked = last_marked(text)
    return last_line(text) if marked is None else marked


def _inside_last(text: str, spans: Iterator[tuple[int, int]]) -> str | None:
    last = max(spans, key=lambda span: (span[1], span[0]), default=None)
    return None if last is None else text[slice(*last)]


def _tag_spans(text: str) -> Iterator[tuple[int, int]]:
    close = text.rfind(CLOSE_TAG)
    opened = text.rfind(OPEN_TAG, 0, max(close, 0))
    if opened >= 0:
        start = opened + len(OPEN_TAG)
        yield start, text.index(CLOSE_TAG, start)


def _box_spans(text: str) -> Iterator[tuple[int, int]]:
    """The contents of balanced boxes; a box without braces holds one character."""
    closing = _closing_braces(text) if BOX.search(text) else {}
    for match in BOX.finditer(text):
        start = match.end()
        if start in closing:
            yield start + 1, closing[start]
        elif text[start : start + 1].isalnum():
            yield start, start + 1


def _closing_braces(text: str) -> dict[int, int]:
    """Where each opening brace is closed; escaped braces do not count."""
    closing, opened = {}, []
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            closing[opened.pop()] = match.start()
    return closing


FINDERS: dict[AnswerPlace, Callable[[str], str | None]] = {
    "auto": likeliest,
    "boxed": last_box,
    "tags": last_tag,
    "marker": last_marked,
    "last_line": last_line,
    "whole": lambda text: text,
}
