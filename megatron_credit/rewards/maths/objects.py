"""Reads a whole answer: lists, tuples, intervals, matrices, ratios, equations and inequalities."""

import re

import sympy

from megatron_credit.rewards.maths.brackets import enclosed, split
from megatron_credit.rewards.maths.equal import same_value
from megatron_credit.rewards.maths.grammar import read_expression
from megatron_credit.rewards.maths.things import Thing, collected
from megatron_credit.rewards.maths.tokens import Unreadable
from megatron_credit.rewards.maths.values import read_value

MAX_CHARS = 2000
ELLIPSIS = Thing("text", tag="...")
BETWEEN = [False, True, False]
GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!,?\d)")
COMMA = re.compile(r",(?!\d{3}(?!\d))|(?<!\d),|;|\\text\s*\{\s*(?:or|and)\s*\}|\b(?:or|and)\b")
EVERY_COMMA = re.compile(r",|;|\\text\s*\{\s*(?:or|and)\s*\}|\b(?:or|and)\b")
RELATION = re.compile(r"\\(?:le|ge|ne|in|approx)(?![A-Za-z])|[=<>]")
CUP = re.compile(r"\\cup(?![A-Za-z])|(?<=[)\]}])\s*U\s*(?=[(\[\\])")
COLON = re.compile(r":")
MATRIX = re.compile(r"\\begin\{([bp]matrix)\}(.*)\\end\{\1\}", re.DOTALL)
INDEX = r"(?:_(?:\w|\{[^{}]*\}))?"
NAME = re.compile(rf"(?:[A-Za-z]{INDEX}|\\(?!pi\b|infty\b)[a-z]+\s*{INDEX}|[A-Z]{{2,3}})'*")
FUNCTION_NAME = re.compile(
    rf"([A-Za-z]{INDEX}'*(?:\^\{{?-1\}}?)?)\s*\(\s*([A-Za-z](?:\s*,\s*[A-Za-z])*)\s*\)"
)
PREFIX = {r"\le": "<=", r"\ge": ">=", r"\ne": "ne", r"\in": "in", r"\approx": "="}


def readings(text: str) -> list[Thing]:
    """What a text in our notation can mean: 1,234 is one number or two. Raises Unreadable."""
    if not text or len(text) > MAX_CHARS:
        raise Unreadable(f"{len(text)} characters are no answer")
    if not GROUPED.search(text):
        return [read_object(text, EVERY_COMMA)]
    return [read_object(text, COMMA), read_object(text, EVERY_COMMA)]


def read_object(text: str, comma: re.Pattern[str]) -> Thing:
    """The object; `comma` is what separates the parts of lists. Raises Unreadable."""
    parts, separators = split(text, comma)
    if separators:
        return _list([part for part in parts if part], separators, comma)
    sides, signs = split(text, RELATION)
    if signs:
        return _relation(sides, [PREFIX.get(sign, sign) for sign in signs], comma)
    return _term(text, comma)


def _list(parts: list[str], separators: list[str], comma: re.Pattern[str]) -> Thing:
    things = [read_object(part, comma) for part in parts]
    if ELLIPSIS in things:
        return Thing("sequence", tuple(things))
    named = {thing.tag for thing in things if thing.kind == "named"}
    if len(named) != 1 or things[0].kind != "named":
        return collected(things)
    # n = 2, 3, 4 and x < 1 or x > 2: all of them belong to the one name.
    inner = [thing.parts[0] if thing.kind == "named" else thing for thing in things]
    intervals = all(thing.kind == "brackets" for thing in inner)
    if intervals and any("or" in separator for separator in separators):
        return Thing("named", (Thing("union", tuple(inner)),), tag=named.pop())
    return Thing("named", (collected(inner),), tag=named.pop())


def _term(text: str, comma: re.Pattern[str]) -> Thing:
    if text == r"\ldots":
        return ELLIPSIS
    matrix = MATRIX.fullmatch(text)
    if matrix:
        return _matrix(matrix[2], comma)
    parts, _ = split(text, CUP)
    if len(parts) > 1:
        return Thing("union", tuple(read_object(part, comma) for part in parts))
    inside = enclosed(text)
    if inside:
        found = _bracketed(*inside, comma)
        if found is not None:
            return found
    ratio, _ = split(text, COLON)
    if len(ratio) > 1:
        return _ratio(text, ratio)
    if text in (r"\emptyset", r"\{ \}", r"\{\}"):
        return Thing("list")
    return read_value(text)


def _bracketed(opening: str, content: str, closing: str, comma: re.Pattern[str]) -> Thing | None:
    if opening == r"\{" and closing == r"\}":
        if not content:
            return Thing("list")
        found = read_object(content, comma)
        return Thing("list", _distinct(found.parts if found.kind == "list" else (found,)))
    if opening not in ("(", "[", r"\langle"):
        return None
    parts, separators = split(content, comma)
    if not separators:
        return None
    things = tuple(read_object(part, comma) for part in parts)
    return Thing("brackets", things, tag=opening + closing)


def _distinct(parts: tuple[Thing, ...]) -> tuple[Thing, ...]:
    """Without the elements that a set holds twice."""
    kept: list[Thing] = []
    for part in parts:
        if not any(part.kind == "value" == other.kind and same_value(part.value, other.value)
                   for other in kept):  # fmt: skip
            kept.append(part)
    return tuple(kept)


def _matrix(content: str, comma: re.Pattern[str]) -> Thing:
    rows = [row.split("&") for row in re.split(r"\\\\|\\cr\b|;", content) if row.strip()]
    if not rows or len({len(row) for row in rows}) != 1:
        raise Unreadable("the rows of the matrix differ in length")
    parts = tuple(read_object(cell.strip(), comma) for row in rows for cell in row)
    return Thing("matrix", parts, tag=f"{len(rows)}x{len(rows[0])}")


def _ratio(text: str, parts: list[str]) -> Thing:
    if any(re.match(r"0\d|$", part) for part in parts):
        return Thing("text", tag="".join(text.split()))  # a time of day: 12:00 is no ratio
    things = tuple(ELLIPSIS if part == r"\ldots" else read_value(part) for part in parts)
    return Thing("sequence" if ELLIPSIS in things else "ratio", things)


def _relation(sides: list[str], signs: list[str], comma: re.Pattern[str]) -> Thing:
    if not all(sides):
        raise Unreadable("one side of the relation is empty")
    if signs[0] == "in":
        return Thing("named", (_term(sides[1], comma),), tag=_name(sides[0]) or sides[0])
    if set(signs) == {"="}:
        return _equation(sides, comma)
    if signs == ["ne"]:
        return Thing("relation", value=_difference(sides), tag="ne")
    return _inequality(sides, signs)


def _name(text: str) -> str | None:
    """The name that a side of an equation is, spelled one way; f(x) without blanks."""
    if NAME.fullmatch(text) or FUNCTION_NAME.fullmatch(text):
        return re.sub(r"[\s{}]", "", text)
    return None


def _equation(sides: list[str], comma: re.Pattern[str]) -> Thing:
    if len(sides) == 2 and _name(sides[1]) and not _name(sides[0]):
        sides = sides[::-1]
    name = _name(sides[0])
    things = [_term(side, comma) for side in (sides[1:] if name else sides)]
    chain = all(_same_plain(things[-1], thing) for thing in things)
    if chain:
        return Thing("named", (things[-1],), tag=name) if name else things[-1]
    if len(sides) == 2 and any(thing.value.free_symbols for thing in things):
        return Thing("relation", value=_difference(sides), tag="=")
    return Thing("false")


def _same_plain(left: Thing, right: Thing) -> bool:
    if left.kind == right.kind == "value":
        return same_value(left.value, right.value)
    return left == right


def _difference(sides: list[str]) -> sympy.Expr:
    if len(sides) != 2:
        raise Unreadable("a chain of relations that are not solved")
    return read_expression(sides[0]) - read_expression(sides[1])


def _inequality(sides: list[str], signs: list[str]) -> Thing:
    if all(sign in (">", ">=") for sign in signs):
        sides, signs = sides[::-1], [sign.replace(">", "<") for sign in signs[::-1]]
    if any(sign not in ("<", "<=") for sign in signs):
        raise Unreadable("a chain of relations in both directions")
    names = [_name(side) for side in sides]
    solved = [name is not None for name in names] in ([True, False], [False, True], BETWEEN)
    if not solved:
        return Thing("relation", value=_difference(sides), tag=signs[0])
    bounds = [None if name else read_value(side) for name, side in zip(names, sides, strict=True)]
    where = names.index(next(filter(None, names)))
    low = bounds[where - 1] if where else Thing("value", value=-sympy.oo)
    high = bounds[where + 1] if where + 1 < len(sides) else Thing("value", value=sympy.oo)
    left = "[" if where and signs[where - 1] == "<=" else "("
    right = "]" if where + 1 < len(sides) and signs[where] == "<=" else ")"
    assert low is not None and high is not None
    interval = Thing("brackets", (low, high), tag=left + right)
    return Thing("named", (interval,), tag=names[where] or "")
