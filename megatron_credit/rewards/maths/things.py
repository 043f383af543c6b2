"""What an answer can be: values, and what is made of them."""

from dataclasses import dataclass
from typing import Literal

import sympy

Kind = Literal[
    "value",  # an expression; tag: its unit, "%" or "" for none
    "list",  # several things in any order: 1, 2 or \{1, 2\}
    "sequence",  # several things in this order, with an ellipsis
    "brackets",  # a tuple, point, interval; tag: both brackets
    "union",  # of sets or intervals
    "matrix",  # tag: its shape
    "ratio",  # 1:2
    "named",  # x = .., f(x) = .., x \in ..; tag: the name
    "relation",  # an equation or inequality that is not solved; value: left - right; tag: = < <= ne
    "false",  # a chain of equations that do not hold
    "text",  # words; tag: the words
]


@dataclass(frozen=True)
class Thing:
    """One mathematical object."""

    kind: Kind
    parts: tuple["Thing", ...] = ()
    value: sympy.Expr = sympy.S.Zero
    tag: str = ""
    decimals: int | None = None
    """Digits behind the point of a value that is written as a decimal of three or more digits."""


def collected(parts: list[Thing]) -> Thing:
    """A list in any order, without the brackets of lists in it; a list of one is its thing."""
    flat = [inner for part in parts for inner in (part.parts if part.kind == "list" else (part,))]
    return flat[0] if len(flat) == 1 else Thing("list", tuple(flat))
