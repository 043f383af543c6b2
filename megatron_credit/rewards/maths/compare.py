"""Whether an answer is the same object as the reference, and the normal form of an object."""

import hashlib
import re
from collections.abc import Sequence

import sympy

from megatron_credit.rewards.maths.equal import coordinate, expandable, near, same_value
from megatron_credit.rewards.maths.grammar import read_expression
from megatron_credit.rewards.maths.objects import FUNCTION_NAME
from megatron_credit.rewards.maths.things import Thing
from megatron_credit.rewards.maths.tokens import Unreadable

MAX_NORMAL_CHARS = 200
NORMAL_DIGITS = 20


def same(reference: Thing, given: Thing, *, tolerance: float = 0.0) -> bool:
    """Whether the answer is right: the same kind of object with the same content."""
    if reference.kind == "named" or given.kind == "named":
        return _same_named(reference, given, tolerance)
    if reference.kind != given.kind:
        return False
    if reference.kind == "value":
        return _same_quantity(reference, given, tolerance)
    if reference.kind == "relation":
        return reference.tag == given.tag and _proportional(reference, given)
    if reference.kind == "ratio":
        return _same_ratio(reference.parts, given.parts)
    if reference.kind == "false":
        return False
    if reference.tag != given.tag or len(reference.parts) != len(given.parts):
        return False
    if reference.kind in ("list", "union"):
        return _same_in_any_order(reference.parts, given.parts, tolerance)
    pairs = zip(reference.parts, given.parts, strict=True)
    return all(same(expected, found, tolerance=tolerance) for expected, found in pairs)


def _same_named(reference: Thing, given: Thing, tolerance: float) -> bool:
    """x = 5 is 5, and f(t) = t is f(x) = x; another name is another object."""
    if reference.kind == given.kind == "named":
        renamed = _with_names_of(reference, given)
        if renamed is None:
            return False
        return same(reference.parts[0], renamed.parts[0], tolerance=tolerance)
    named, other = (reference, given) if reference.kind == "named" else (given, reference)
    if other.kind == "relation":
        equation = _as_equation(named)
        return equation is not None and other.tag == "=" and _proportional(equation, other)
    if reference.kind == "named":
        return same(reference.parts[0], given, tolerance=tolerance)
    return same(reference, given.parts[0], tolerance=tolerance)


def _with_names_of(reference: Thing, given: Thing) -> Thing | None:
    """The answer with the reference's arguments; None when the names differ otherwise."""
    if reference.tag == given.tag:
        return given
    expected, found = (FUNCTION_NAME.fullmatch(thing.tag) for thing in (reference, given))
    if not expected or not found or expected[1] != found[1]:
        return None
    old, new = (re.findall(r"\w", match[2]) for match in (found, expected))
    inner = given.parts[0]
    if len(old) != len(new) or inner.kind != "value":
        return None
    names = [(sympy.Symbol(a), sympy.Symbol(b)) for a, b in zip(old, new, strict=True)]
    value = inner.value.subs(names, simultaneous=True)
    return Thing("named", (Thing("value", value=value),), tag=reference.tag)


def _as_equation(named: Thing) -> Thing | None:
    """y = 2x + 1 as an equation; None for x = 5, which says more than an equation for x."""
    inner = named.parts[0]
    if inner.kind != "value" or not inner.value.free_symbols:
        return None
    try:
        name = read_expression(named.tag)
    except Unreadable:
        return None
    if name.free_symbols & inner.value.free_symbols:
        return None
    return Thing("relation", value=name - inner.value, tag="=")


def _same_quantity(reference: Thing, given: Thing, tolerance: float) -> bool:
    if reference.tag and given.tag and reference.tag != given.tag:
        return False
    if _same_number(reference, given.value, tolerance):
        return True
    if "%" not in (reference.tag, given.tag) or reference.tag == given.tag:
        return False
    # 50% is 0.5, and 50 where the question asks for percent; below 1 that could be either.
    figure = 100 * (reference if reference.tag == "%" else given).value
    other = given.value if reference.tag == "%" else reference.value
    return bool(figure.is_Rational and abs(figure) > 1 and same_value(figure, other))


def _same_number(reference: Thing, value: sympy.Expr, tolerance: float) -> bool:
    expected = reference.value
    if same_value(expected, value):
        return True
    if tolerance and near(expected, value, sympy.Rational(str(tolerance)) * abs(expected)):
        return True
    if reference.decimals is None or _has_decimals(value):
        return False
    # The reference was rounded, and what came has no decimal form that could be compared.
    return near(expected, value, sympy.Rational(1, 2 * 10**reference.decimals))


def _has_decimals(value: sympy.Expr) -> bool:
    if not isinstance(value, sympy.Rational):
        return False
    rest = int(value.q)
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def _proportional(reference: Thing, given: Thing) -> bool:
    """Whether one equation is a multiple of the other by a number; of inequalities, a positive."""
    if reference.value == 0 or given.value == 0:
        return False
    if reference.value.free_symbols != given.value.free_symbols:
        return False
    symbols = sorted(reference.value.free_symbols, key=str)
    # No equation that people write holds at this point by accident.
    point = [(symbol, coordinate(1, place)) for place, symbol in enumerate(symbols)]
    expected, found = (thing.value.subs(point) for thing in (reference, given))
    if expected == 0 or found == 0 or not (expected.is_real and found.is_real):
        return same_value(reference.value, given.value)
    if reference.tag in ("<", "<=") and (expected > 0) != (found > 0):
        return False
    return same_value(reference.value * found, given.value * expected)


def _same_ratio(reference: Sequence[Thing], given: Sequence[Thing]) -> bool:
    if len(reference) != len(given):
        return False
    return all(
        same_value(expected.value * given[0].value, found.value * reference[0].value)
        for expected, found in zip(reference, given, strict=True)
    )


def _same_in_any_order(
    reference: Sequence[Thing], given: Sequence[Thing], tolerance: float
) -> bool:
    if {thing.tag for thing in reference if thing.kind == "named"} != {
        thing.tag for thing in given if thing.kind == "named"
    }:
        return False  # 2 and 3 do not say which of x and y is which
    left = list(given)
    for expected in reference:
        match = next((t for t in left if same(expected, t, tolerance=tolerance)), None)
        if match is None:
            return False
        left.remove(match)
    return not left


def normal_form(thing: Thing) -> str:
    """A text that is the same for equal objects; long ones are cut to a digest."""
    spelled = _spelled(thing)
    if len(spelled) <= MAX_NORMAL_CHARS:
        return spelled
    return f"sha256:{hashlib.sha256(spelled.encode()).hexdigest()[:32]}"


def _spelled(thing: Thing) -> str:
    if thing.kind == "value":
        return spelled_value(thing.value)
    if thing.kind == "named":
        return f"{thing.tag} = {_spelled(thing.parts[0])}"
    if thing.kind == "relation":
        return f"{spelled_value(thing.value)} {thing.tag} 0"
    parts = [_spelled(part) for part in thing.parts]
    if thing.kind in ("list", "union"):
        parts.sort()
    inner = ", ".join(parts)
    if thing.kind == "brackets":
        return f"{thing.tag[0]}{inner}{thing.tag[-1]}"
    return {"list": f"{{{inner}}}", "text": thing.tag}.get(thing.kind, f"{thing.kind}({inner})")


def spelled_value(value: sympy.Expr) -> str:
    """An expression: rational numbers exactly, other constants to 20 digits, the rest expanded."""
    if isinstance(value, sympy.Rational):
        return _hexadecimal(value) if _is_long(value) else str(value)
    if not value.free_symbols and value.is_number and value.is_finite:
        return f"~{value.evalf(NORMAL_DIGITS + 10).evalf(NORMAL_DIGITS)}"
    if any(_is_long(number) for number in value.atoms(sympy.Rational)):
        return sympy.srepr(value.evalf(NORMAL_DIGITS))
    return str(sympy.expand(value) if expandable(value) else value)


def _is_long(number: sympy.Rational) -> bool:
    """Python refuses to write more than 4300 digits."""
    return max(int(number.p).bit_length(), int(number.q).bit_length()) > 10_000


def _hexadecimal(value: sympy.Rational) -> str:
    return f"{int(value.p):x}/{int(value.q):x}"
