"""Splits an expression in our notation into tokens."""

import re

MAX_TOKENS = 400


class Unreadable(ValueError):
    """The text is not an expression; the message says where."""


TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+|\.(?![\d.]))?|\.\d+)"
    r"(?P<exponent>[eE][+-]?\d+(?![\d.]))?"
    r"|\\(?P<command>[A-Za-z]+)|(?P<letters>[A-Za-z]+)|(?P<sign>[-+/^_()\[\]{}|!]))"
)
PROSE = {
    "is", "so", "no", "or", "an", "the", "and", "of", "to", "in", "it", "as", "at", "be", "by",
    "we", "if", "on", "yes", "not", "are", "for", "let", "any", "all", "add", "sum", "mod", "cm",
    "mm", "km", "kg", "mg", "ml", "ft", "lb", "oz", "min", "sec", "hr", "mph",
}  # fmt: skip
MAX_PRODUCT = 3
"""Longer runs of letters are words, not products of variables."""
Token = tuple[str, str]
END: Token = ("end", "")


def tokens(text: str) -> list[Token]:
    """(type, spelling) of each token; runs of letters are split into variables."""
    found: list[Token] = []
    end = len(text.rstrip())
    position = 0
    while position < end:
        match = TOKEN.match(text, position)
        if match is None:
            raise Unreadable(f"{text[position : position + 20]!r} is not part of an expression")
        position = match.end()
        if match["letters"]:
            found += _variables(match["letters"])
        elif match["number"]:
            found.append(("number", match["number"].replace(",", "") + (match["exponent"] or "")))
        else:
            kind = "command" if match["command"] else "sign"
            found.append((kind, match[kind]))
    if len(found) > MAX_TOKENS:
        raise Unreadable(f"{len(found)} tokens are too many for an answer")
    return found


def _variables(letters: str) -> list[Token]:
    if len(letters) > MAX_PRODUCT or letters.lower() in PROSE:
        raise Unreadable(f"{letters!r} is a word, not part of an expression")
    return [("letter", letter) for letter in letters]
