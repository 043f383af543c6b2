"""Reads values: an expression with a unit, a percent sign or a base, or a few words."""

import logging
import re

import sympy

from megatron_credit.rewards.maths.grammar import read_expression
from megatron_credit.rewards.maths.things import Thing, collected
from megatron_credit.rewards.maths.tokens import Unreadable

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off

PLUS_MINUS = re.compile(r"\\(pm|mp)\b")
CALCULUS = re.compile(r"\\(sum|prod|int|lim)\b")
DECIMAL = re.compile(r"-?\s*\d*\.\d+")
BASE = re.compile(r"(\d+)\s*_\s*\{?\s*(\d+)\s*\}?")
POWER = r"(?:\s*\^\s*\{?[23]\}?)?"
UNIT = re.compile(
    rf"(?P<value>.+?)\s*(?P<unit>\\text\s*\{{[^{{}}]*\}}{POWER}|\\degree\s*[CF]?)"
    rf"|(?P<number>.*?[\d)}}|!])\s*(?P<word>(?<![A-Za-z\\])[A-Za-z]{{2,}}\.?"
    rf"(?:[ /]+[A-Za-z]+\.?){{0,2}}{POWER})",
    re.DOTALL,
)
WORDS = re.compile(r"(?=.*[^\W\d_]{3}|[^\W\d_]+$)\w+(?:[ .,'-]+\w+){0,7}")
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
NOT_UNITS = {
    "is", "are", "was", "the", "and", "or", "of", "to", "not", "if", "for", "when", "where",
    "dozen", "answer", "so", "then", "thus", "but", "because", "from", "with", "we", "which", "pi",
    "mod",
}  # fmt: skip
UNIT_NAMES = {
    "dollar": "", "unit": "", "degree": "degree", "centimeter": "cm", "centimetre": "cm",
    "meter": "m", "metre": "m", "kilometer": "km", "kilometre": "km", "inche": "inch", "in": "inch",
    "feet": "foot", "ft": "foot", "minute": "min", "hour": "h", "hr": "h", "second": "s",
    "sec": "s",
    "gram": "g", "kilogram": "kg", "millimeter": "mm", "liter": "l", "litre": "l", "mile": "mile",
}  # fmt: skip


def read_value(text: str) -> Thing:
    """The value; two of them where there is a plus-minus sign. Raises Unreadable."""
    if PLUS_MINUS.search(text):
        plus = PLUS_MINUS.sub(lambda sign: "+" if sign[1] == "pm" else "-", text)
        minus = PLUS_MINUS.sub(lambda sign: "-" if sign[1] == "pm" else "+", text)
        return collected([read_value(plus), read_value(minus)])
    if text.endswith("%"):
        return Thing("value", value=_expression(text[:-1].strip()) / 100, tag="%")
    base = BASE.fullmatch(text)
    if base:
        return Thing("value", value=sympy.Integer(base[1]), tag=f"base {base[2]}")
    try:
        return Thing("value", value=_expression(text), decimals=_decimals(text))
    except Unreadable:
        return _with_unit(text) or _words(text)


def _expression(text: str) -> sympy.Expr:
    return _calculus(text) if CALCULUS.search(text) else read_expression(text)


def _calculus(text: str) -> sympy.Expr:
    """Sums, products, integrals and limits as math-verify reads them, carried out."""
    from math_verify import LatexExtractionConfig, parse

    if "text" in text or re.search(r"(?<![A-Za-z\\])[A-Za-z]{3,}", text):
        raise Unreadable(f"{text[:80]!r} has words in it")
    found = parse(
        f"${text}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=0
    )
    if len(found) != 1 or not isinstance(found[0], sympy.Expr):
        raise Unreadable(f"math-verify cannot read {text[:80]!r}")
    value = found[0].doit()
    # math-verify's variables carry assumptions, and equal names would not be equal variables.
    return value.subs([(symbol, sympy.Symbol(str(symbol))) for symbol in value.free_symbols])


def _decimals(text: str) -> int | None:
    """Digits behind the point, where a rounded value can be told from a short exact one."""
    if not DECIMAL.fullmatch(text):
        return None
    digits = text.lstrip("- 0").replace(".", "").lstrip("0")
    return len(text.partition(".")[2]) if len(digits) >= 3 else None


def _with_unit(text: str) -> Thing | None:
    match = UNIT.fullmatch(text)
    if match is None:
        return None
    unit = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", match["unit"] or match["word"])
    words = unit.replace(".", "").replace("\\degree", "degree ").split()
    if not words or NOT_UNITS.intersection(word.lower() for word in words):
        return None
    number = match["value"] or match["number"]
    value = _expression(number)
    if words[0].lower() in SCALES:
        value *= 10 ** SCALES[words.pop(0).lower()]
    unit = _unit_name(" ".join(words))
    if unit == "percent":
        return Thing("value", value=value / 100, tag="%")
    return Thing("value", value=value, tag=unit, decimals=_decimals(number))


def _unit_name(unit: str) -> str:
    r"""One name for cm, centimeters and \text{cm}; case matters where it does in the SI."""
    name, _, power = re.sub(r"[{}\s]", "", unit).partition("^")
    if len(name) > 3:
        name = name.lower().removesuffix("s")
    name = UNIT_NAMES.get(name, name)
    return f"{name}^{power}" if power else name


def _words(text: str) -> Thing:
    plain = re.sub(r"\\text\{([^{}]*)\}", r"\1", text).strip()
    if re.fullmatch(r"\(\s*[A-Za-z]\s*\)", plain):
        plain = plain.strip("() ")
    if not WORDS.fullmatch(plain):
        raise Unreadable(f"{text[:80]!r} is neither maths nor words")
    return Thing("text", tag=" ".join(plain.split()).casefold())
