"""What each LaTeX command means, and arithmetic that refuses results of too many digits."""

from collections.abc import Callable
from fractions import Fraction
from typing import Protocol

import sympy

from megatron_credit.rewards.maths.tokens import Unreadable

MAX_BITS = 40_000
MAX_FACTORIAL = 3000
# Roots are simplified by factoring what is under them.
MAX_ROOT_BITS = 512

GREEK = {
    "alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "kappa", "lambda", "mu",
    "nu", "xi", "rho", "sigma", "tau", "phi", "chi", "psi", "omega", "Gamma", "Delta", "Theta",
    "Lambda", "Sigma", "Phi", "Psi", "Omega", "ell",
}  # fmt: skip
CONSTANTS = {"pi": sympy.pi, "infty": sympy.oo, "e": sympy.E, "i": sympy.I}
UNARY: dict[str, Callable[..., sympy.Expr]] = {
    name: getattr(sympy, name)
    for name in ("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh",
                 "tanh", "exp", "floor")
} | {"ln": sympy.log, "abs": sympy.Abs, "ceil": sympy.ceiling}  # fmt: skip
INVERSE = {"sin": sympy.asin, "cos": sympy.acos, "tan": sympy.atan, "cot": sympy.acot}
CLOSING = {"(": ")", "[": "]", "{": "}", r"\{": r"\}"}


class Reader(Protocol):
    """What a command reads its arguments with; see `grammar.ExpressionReader`."""

    def skip(self, kind: str, spelling: str) -> bool: ...
    def sum(self) -> sympy.Expr: ...
    def primary(self) -> sympy.Expr: ...
    def bracketed(self, closing: str) -> sympy.Expr: ...
    def exponent(self) -> sympy.Expr: ...
    def argument(self) -> sympy.Expr: ...
    def operand(self) -> sympy.Expr: ...
    def subscript(self) -> str: ...


def rational(digits: str) -> sympy.Expr:
    mantissa, _, exponent = digits.lower().partition("e")
    if abs(int(exponent or 0)) * 4 > MAX_BITS or len(mantissa) * 4 > MAX_BITS:
        raise Unreadable(f"{digits[:20]} is too large or too small for an answer")
    value = Fraction(mantissa) * Fraction(10) ** int(exponent or 0)
    return sympy.Rational(value.numerator, value.denominator)


def quotient(top: sympy.Expr, bottom: sympy.Expr) -> sympy.Expr:
    if bottom == 0:
        raise Unreadable("division by zero")
    return top / bottom


def power(base: sympy.Expr, exponent: sympy.Expr) -> sympy.Expr:
    """The power, unless writing it out takes more digits than an answer has."""
    if isinstance(base, sympy.Rational) and exponent.is_Rational and base not in (0, 1, -1):
        bits = max(int(base.p).bit_length(), int(base.q).bit_length())
        if bits * abs(exponent) > MAX_BITS or (bits > MAX_ROOT_BITS and not exponent.is_Integer):
            raise Unreadable("a power is too large or too small for an answer")
    if base == 0 and exponent.is_negative:
        raise Unreadable("division by zero")
    return base**exponent


def _fraction(reader: Reader, _: str) -> sympy.Expr:
    return quotient(reader.argument(), reader.argument())


def _root(reader: Reader, _: str) -> sympy.Expr:
    index = reader.bracketed("]") if reader.skip("sign", "[") else sympy.Integer(2)
    # In plain text a number under the root has all its digits: sqrt 12.
    value = reader.primary()
    if index == 0:
        raise Unreadable("a root with index 0")
    if index.is_Integer and index % 2 and value.is_negative:
        return -power(-value, 1 / index)
    return power(value, 1 / index)


def _function(reader: Reader, name: str) -> sympy.Expr:
    function, power = UNARY[name], sympy.Integer(1)
    if reader.skip("sign", "^"):
        power = reader.exponent()
        if power == -1 and name in INVERSE:
            function, power = INVERSE[name], sympy.Integer(1)
    return function(reader.operand()) ** power


def _logarithm(reader: Reader, _: str) -> sympy.Expr:
    r"""\log_b x; without a base the natural one, as sympy and math-verify have it."""
    base = reader.argument() if reader.skip("sign", "_") else None
    value = reader.operand()
    if base in (0, 1) or value == 0:
        raise Unreadable("a logarithm that does not exist")
    return sympy.log(value) if base is None else sympy.log(value, base)


def _binomial(reader: Reader, _: str) -> sympy.Expr:
    top, bottom = reader.argument(), reader.argument()
    if top.is_Integer and not 0 <= top <= MAX_FACTORIAL:
        raise Unreadable("a binomial is too large for an answer")
    return sympy.binomial(top, bottom)


def _between(reader: Reader, name: str) -> sympy.Expr:
    value = reader.sum()
    if not reader.skip("command", "r" + name[1:]):
        raise Unreadable(f"{name} is not closed")
    return sympy.floor(value) if name == "lfloor" else sympy.ceiling(value)


def _greek(reader: Reader, name: str) -> sympy.Expr:
    return sympy.Symbol(f"{name}_{reader.subscript()}" if reader.skip("sign", "_") else name)


READERS: dict[str, Callable[[Reader, str], sympy.Expr]] = {
    **dict.fromkeys(UNARY, _function),
    **dict.fromkeys(GREEK, _greek),
    **{name: lambda _, constant: CONSTANTS[constant] for name in ("pi", "infty")},
    "frac": _fraction,
    "sqrt": _root,
    "log": _logarithm,
    "binom": _binomial,
    "lfloor": _between,
    "lceil": _between,
}
