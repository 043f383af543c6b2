"""Whether two expressions have the same value, wherever both have a real one.

Rational numbers and polynomials are compared exactly. Everything else is compared at 50 digits
relative to its size, at fixed points where it has variables, and what agrees there again at 400.
"""

import functools

import sympy
from sympy.core.function import AppliedUndef

DIGITS, MORE_DIGITS = 50, 400
NUM_POINTS = 8
NEEDED_POINTS = 3
MAX_EXPANDED = 24
"""Highest power times number of variables that is multiplied out."""


def same_value(left: sympy.Expr, right: sympy.Expr) -> bool:
    """True when the expressions are equal."""
    if left == right:
        return True
    if left.is_Rational and right.is_Rational:
        return False
    if left.has(sympy.oo, -sympy.oo) or right.has(sympy.oo, -sympy.oo):
        return False
    left, right = _functions_as_variables(left, right)
    exact = _polynomials_agree(left, right)
    if exact is not None:
        return exact
    return _agree_at_points(left, right)


def near(left: sympy.Expr, right: sympy.Expr, allowed: sympy.Expr) -> bool:
    """Whether two real constants are at most `allowed` apart."""
    if left.free_symbols or right.free_symbols:
        return False
    distance = sympy.Abs(left - right).evalf(DIGITS)
    return bool(distance.is_number and distance.is_finite and distance <= allowed)


def _functions_as_variables(left: sympy.Expr, right: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    """f(x) of a function that nobody defined is as good as a variable."""
    unknown = left.atoms(AppliedUndef) | right.atoms(AppliedUndef)
    names = [(applied, sympy.Symbol(f"value of {applied}")) for applied in unknown]
    return left.subs(names), right.subs(names)


def _polynomials_agree(left: sympy.Expr, right: sympy.Expr) -> bool | None:
    """The exact comparison of polynomials with rational coefficients; None: they are none."""
    symbols = left.free_symbols | right.free_symbols
    difference = left - right
    if not symbols or not difference.is_polynomial(*symbols):
        return None
    if not expandable(difference) or difference.has(sympy.E, sympy.pi, sympy.I, sympy.Function):
        return None
    return sympy.expand(difference) == 0


def expandable(expression: sympy.Expr) -> bool:
    """Whether multiplying out is cheap: whole powers, small for that many variables."""
    highest = MAX_EXPANDED // max(len(expression.free_symbols), 1)
    powers = [power.exp for power in expression.atoms(sympy.Pow)]
    return all(power.is_Integer and abs(power) <= highest for power in powers)


def _agree_at_points(left: sympy.Expr, right: sympy.Expr) -> bool:
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    if not symbols:
        return all(_agree(left, right, {}, digits) for digits in (DIGITS, MORE_DIGITS))
    verdicts = []
    for number in range(NUM_POINTS):
        point = {symbol: coordinate(number, place) for place, symbol in enumerate(symbols)}
        verdicts.append(_agree(left, right, dict(point), DIGITS))
        if verdicts[-1] is False:
            return False
    return verdicts.count(True) >= NEEDED_POINTS


@functools.cache
def coordinate(number: int, place: int) -> sympy.Expr:
    """Coordinate `place` of point `number`: positive and negative numbers without a pattern."""
    spread = (number + 1) * 7919 + (place + 1) * 104729
    sign = -1 if (number >> (place % 3)) & 1 else 1
    return sympy.Rational(sign * (spread % 3571 + 211), 1009)


def _agree(
    left: sympy.Expr, right: sympy.Expr, point: dict[sympy.Basic, sympy.Basic | float], digits: int
) -> bool | None:
    """Whether two expressions agree at a point to that many digits; None: at least one of them has
    no real value there, and they are not the same complex number either."""
    # Floating point from the start: exact powers of the coordinates could have any length.
    values = [side.evalf(digits + 10, subs=point, maxn=2000) for side in (left, right)]
    if not all(value.is_number and value.is_finite for value in values):
        return None
    size = max(abs(value) for value in values)
    same = bool(abs(values[0] - values[1]) <= size * sympy.Float(10, digits) ** -digits)
    return True if same else False if all(value.is_real for value in values) else None
