"""Numbers as people write them, read exactly."""

import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple

# Longer texts and larger exponents are no answers, and exact arithmetic on them costs time.
MAX_CHARS = 200
MAX_EXPONENT = 4000

SIGNS = str.maketrans("\u2212\u2013\u2014\u00d7\u00b7\u22c5\u2044", "---***/")
UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
EXPONENT = r"(?:[eE]|\s*(?:\*|\\times|\\cdot|x)\s*10\s*(?:\^|\*\*)\s*)(?:\{?)([+-]?\d+)\}?"
NUMBER = re.compile(
    rf"(?P<sign>[+-]?)\s*[$\u20ac\u00a3]?\s*(?P<sign2>-?)"
    rf"(?:(?P<whole>\d+)\s+(?=\d+\s*/))?"
    rf"(?P<top>{UNSIGNED})(?:{EXPONENT})?"
    rf"(?:\s*/\s*(?P<bottom>\d+))?"
    rf"\s*(?P<percent>%?)\s*(?P<unit>.*)",
    re.DOTALL,
)
LATEX_FRACTION = re.compile(r"\\[dtc]?frac\s*\{?\s*(\d+)\s*\}?\s*\{?\s*(\d+)\s*\}?")
UNIT = re.compile(r"[^\W\d_]+(?:[ /*.-][^\W\d_]+|\^\{?-?[1-9]\}?)*|[\u20ac\u00b0$\u00a3]")
SCALES = {"hundred": 2, "thousand": 3, "k": 3, "million": 6, "billion": 9, "trillion": 12}
NO_UNITS = {
    "dozen", "pi", "e", "i", "x", "or", "and", "to", "is", "are", "was", "not", "the", "percent",
}  # fmt: skip
"""Words behind a number that make it another number, or part of a sentence."""
WRAPPERS = re.compile(
    r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}|\\[(),;:!\[\]]|\\left|\\right"
)


class Quantity(NamedTuple):
    """An exact number and the unit it was written with ("" for none)."""

    value: Fraction
    unit: str


def read_number(text: str) -> Quantity | None:
    """The number that the whole text is, with at most a name before it and a unit behind it.

    Understands signs, 1,234.5, 1.2e-3, 1.2 x 10^-3, 3/4, 2 1/2, LaTeX fractions, currency signs,
    percent (a factor of 1/100) and words such as million. None: the text is something else.
    """
    if len(text) > MAX_CHARS:
        return None
    match = NUMBER.fullmatch(_plain(text))
    return None if match is None else _quantity(match)


def _plain(text: str) -> str:
    """The text without markup, as one line of ASCII where there is an ASCII sign for it."""
    text = unicodedata.normalize("NFKC", text.translate(SIGNS))
    text = WRAPPERS.sub(lambda match: match[1] or "", text)
    text = LATEX_FRACTION.sub(r" \1/\2 ", text).replace("{,}", ",").replace("\\$", "$")
    text = text.replace("\\%", "%").strip().strip("*`").strip()
    if len(text) > 1 and text[0] == text[-1] == "$":
        text = text.strip("$")
    text = re.sub(r"^[A-Za-z]\w*\s*=\s*", "", text.strip())
    return re.sub(r"(?<=[\w%])[.,;]$", "", text).strip()


def _quantity(match: re.Match[str]) -> Quantity | None:
    unit = match["unit"].strip().rstrip(".").strip()
    word = unit.partition(" ")[0].lower()
    scale = SCALES.get(word, 0)
    if scale:
        unit = unit[len(word) :].strip()
    if unit.lower() == "percent":
        unit, scale = "", -2
    if unit and (not UNIT.fullmatch(unit) or NO_UNITS.intersection(unit.lower().split())):
        return None
    value = _value(match)
    if value is None:
        return None
    value *= Fraction(10) ** scale / (100 if match["percent"] else 1)
    return Quantity(-value if (match["sign"] + match["sign2"]) == "-" else value, unit)


def _value(match: re.Match[str]) -> Fraction | None:
    exponent = int((match[5] or "0")[:8])
    if abs(exponent) > MAX_EXPONENT or (match["bottom"] and int(match["bottom"]) == 0):
        return None
    value = Fraction(match["top"].replace(",", "")) * Fraction(10) ** exponent
    if match["bottom"]:
        value /= int(match["bottom"])
    return value + int(match["whole"] or 0)
