"""Reads one expression in our notation; all of it or nothing.

Stricter than LaTeX readers that skip what they do not know: a word, a stray sign or two numbers
side by side make the text unreadable. Numbers are exact. What would need more digits than an answer
has is refused before it is computed.
"""

import sympy

from megatron_credit.rewards.maths.commands import (
    CONSTANTS,
    GREEK,
    MAX_FACTORIAL,
    READERS,
    power,
    quotient,
    rational,
)
from megatron_credit.rewards.maths.tokens import END, Token, Unreadable, tokens

MAX_DEPTH = 40
CLOSING = {"(": ")", "[": "]", "{": "}"}


def read_expression(text: str) -> sympy.Expr:
    """The expression; raises Unreadable."""
    reader = ExpressionReader(tokens(text))
    found = reader.sum()
    if reader.next != END:
        raise Unreadable(f"did not expect {reader.next[1]!r} in {text[:80]!r}")
    if found.has(sympy.nan, sympy.zoo):
        raise Unreadable(f"{text[:80]!r} is not a number: it divides by zero")
    return found


class ExpressionReader:
    """Recursive descent over the tokens; each method reads what its name says."""

    def __init__(self, found: list[Token]) -> None:
        self._tokens = [*found, END]
        self._position = 0
        self._depth = 0
        self._in_bars = False

    @property
    def next(self) -> Token:
        return self._tokens[self._position]

    def take(self) -> Token:
        if self.next == END:
            raise Unreadable("the text ends too early")
        self._position += 1
        return self._tokens[self._position - 1]

    def skip(self, kind: str, spelling: str) -> bool:
        if self.next == (kind, spelling):
            self._position += 1
            return True
        return False

    def expect(self, spelling: str) -> None:
        if not self.skip("sign", spelling):
            raise Unreadable(f"expected {spelling!r} and found {self.next[1]!r}")

    def sum(self) -> sympy.Expr:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unreadable("brackets are nested too deeply")
        total = self.product()
        while self.next in (("sign", "+"), ("sign", "-")):
            sign = 1 if self.take()[1] == "+" else -1
            total = total + sign * self.product()
        self._depth -= 1
        return total

    def product(self) -> sympy.Expr:
        total = self.signed()
        while True:
            if self.skip("command", "cdot"):
                total = total * self.signed()
            elif self.skip("sign", "/"):
                total = quotient(total, self.signed())
            elif self.starts_factor():
                if self.next[0] == "number":
                    raise Unreadable(f"two numbers side by side before {self.next[1]!r}")
                total = total * self.power()
            else:
                return total

    def starts_factor(self) -> bool:
        kind, spelling = self.next
        if kind == "sign":
            return spelling in ("(", "[", "{") or (spelling == "|" and not self._in_bars)
        return kind in ("number", "letter") or (kind == "command" and spelling in READERS)

    def signed(self) -> sympy.Expr:
        negative = False
        while self.next in (("sign", "+"), ("sign", "-")):
            negative ^= self.take()[1] == "-"
        value = self.power()
        return -value if negative else value

    def power(self) -> sympy.Expr:
        base = self.postfix()
        if self.skip("sign", "^"):
            return power(base, self.exponent())
        return base

    def exponent(self) -> sympy.Expr:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unreadable("exponents are nested too deeply")
        negative = self.skip("sign", "-")
        value = self.power()
        self._depth -= 1
        return -value if negative else value

    def postfix(self) -> sympy.Expr:
        value = self.primary()
        while self.skip("sign", "!"):
            if value.is_Integer and not 0 <= value <= MAX_FACTORIAL:
                raise Unreadable("a factorial is too large for an answer")
            value = sympy.factorial(value)
        return value

    def primary(self) -> sympy.Expr:
        kind, spelling = self.take()
        if kind == "number":
            return self.number(spelling)
        if kind == "letter":
            return self.variable(spelling)
        if kind == "command" and spelling in READERS:
            return READERS[spelling](self, spelling)
        if kind == "sign" and spelling in CLOSING:
            return self.bracketed(CLOSING[spelling])
        if kind == "sign" and spelling == "|":
            return self.bars()
        raise Unreadable(f"did not expect {spelling!r}")

    def bracketed(self, closing: str) -> sympy.Expr:
        outer, self._in_bars = self._in_bars, False
        value = self.sum()
        self.expect(closing)
        self._in_bars = outer
        return value

    def bars(self) -> sympy.Expr:
        outer, self._in_bars = self._in_bars, True
        value = self.sum()
        self.expect("|")
        self._in_bars = outer
        return sympy.Abs(value)

    def number(self, digits: str) -> sympy.Expr:
        value = rational(digits)
        if self.skip("command", "overline"):
            return value + self.repeated(digits)
        return value + self.mixed() if value.is_Integer else value

    def repeated(self, digits: str) -> sympy.Expr:
        """The digits under the bar, that go on for ever."""
        self.expect("{")
        kind, block = self.take()
        self.expect("}")
        if kind != "number" or not block.isdigit() or "." not in digits:
            raise Unreadable("a bar stands over digits behind a decimal point")
        places = len(digits.partition(".")[2])
        return sympy.Rational(int(block), (10 ** len(block) - 1) * 10**places)

    def mixed(self) -> sympy.Expr:
        r"""The proper fraction that follows at once: 2 1/2 or 2\frac12; 0 when none does."""
        start = self._position
        if self.next[0] == "number" and self._tokens[start + 1] == ("sign", "/"):
            top, _, bottom = self.integer(), self.take(), self.integer()
        elif self.skip("command", "frac"):
            top, bottom = self.argument(), self.argument()
        else:
            return sympy.Integer(0)
        if top.is_Integer and bottom.is_Integer and 0 < top < bottom:
            return top / bottom
        if self._tokens[start][0] == "number":
            raise Unreadable("two numbers side by side")
        self._position = start
        return sympy.Integer(0)

    def integer(self) -> sympy.Expr:
        kind, digits = self.take()
        return rational(digits) if kind == "number" else sympy.nan

    def variable(self, letter: str) -> sympy.Expr:
        if self.skip("sign", "_"):
            return sympy.Symbol(f"{letter}_{self.subscript()}")
        if letter in "fgh" and self.next == ("sign", "("):
            self.take()
            return sympy.Function(letter)(self.bracketed(")"))
        return CONSTANTS.get(letter) or sympy.Symbol(letter)

    def subscript(self) -> str:
        if not self.skip("sign", "{"):
            return self.take()[1]
        spelled = ""
        while not self.skip("sign", "}"):
            spelled += self.take()[1]
        return spelled

    def argument(self) -> sympy.Expr:
        r"""What a command applies to: {..}, or one token, of a number only its first digit."""
        if self.next == ("sign", "{"):
            return self.primary()
        kind, digits = self.next
        if kind == "number" and digits.isdigit() and len(digits) > 1:
            here = self._position
            self._tokens[here : here + 1] = [(kind, digits[0]), (kind, digits[1:])]
        return rational(self.take()[1]) if kind == "number" else self.primary()

    def operand(self) -> sympy.Expr:
        r"""What \sin and \log apply to: (..), or a product without brackets such as 2x."""
        if self.next in (("sign", "("), ("sign", "{"), ("sign", "[")):
            return self.postfix()
        value = self.power()
        while self.next[0] == "letter" or self.next[1] in GREEK | {"pi", "frac", "sqrt"}:
            value = value * self.power()
        return value
