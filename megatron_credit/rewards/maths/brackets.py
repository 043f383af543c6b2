r"""Finds what stands at the top level of a text, outside of brackets of any kind."""

import re
from collections.abc import Iterator

PIECE = re.compile(r"\\[{}]|\\[A-Za-z]+|.", re.DOTALL)
OPENING = {"(", "[", "{", r"\{", r"\langle", r"\lfloor", r"\lceil", r"\begin"}
CLOSING = {")", "]", "}", r"\}", r"\rangle", r"\rfloor", r"\rceil", r"\end"}


def split(text: str, separator: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """The stripped parts of the text between top-level separators, and the separators."""
    parts, found, start = [], [], 0
    for begin, end in _matches(text, separator):
        parts.append(text[start:begin].strip())
        found.append(text[begin:end].strip())
        start = end
    return [*parts, text[start:].strip()], found


def enclosed(text: str) -> tuple[str, str, str] | None:
    """(opening bracket, content, closing bracket) when one pair encloses the whole text."""
    pieces = [match for match in PIECE.finditer(text) if not match[0].isspace()]
    if len(pieces) < 2 or pieces[0][0] not in OPENING or pieces[-1][0] not in CLOSING:
        return None
    depth = 0
    for piece in pieces:
        depth += (piece[0] in OPENING) - (piece[0] in CLOSING)
        if depth == 0 and piece is not pieces[-1]:
            return None
    if depth:
        return None
    return pieces[0][0], text[pieces[0].end() : pieces[-1].start()].strip(), pieces[-1][0]


def _matches(text: str, separator: re.Pattern[str]) -> Iterator[tuple[int, int]]:
    depth, position = 0, 0
    while position < len(text):
        match = separator.match(text, position) if depth == 0 else None
        if match is not None:
            yield match.span()
            position = match.end()
            continue
        piece = PIECE.match(text, position)
        assert piece is not None
        depth = max(0, depth + (piece[0] in OPENING) - (piece[0] in CLOSING))
        position = piece.end()
