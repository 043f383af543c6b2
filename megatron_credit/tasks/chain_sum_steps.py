r"""The exact process reward model of chain sums: function =
"megatron_credit.tasks.chain_sum_steps:score_steps", with step_separator = ";".

The steps of 6 + 7 - 8 are `6+7=13;`, `13-8=5;` and `<answer>5</answer>` or `\boxed{5}`.
"""

import re
from collections.abc import Sequence
from typing import Any

from megatron_credit.tasks.solver import ChainExpression, exact_step, parse_question

# Bounded digits: reading a number takes time quadratic in its length.
_NUMBER = r"(-?[0-9]{1,18})"
_STEP = re.compile(rf"{_NUMBER} ?([+-]) ?([0-9]{{1,18}}) ?= ?{_NUMBER}")
_ANSWER = re.compile(rf"<answer> ?{_NUMBER} ?</answer>|\\boxed\{{ ?{_NUMBER} ?\}}")


def score_steps(prompt: str, steps: Sequence[str], metadata: dict[str, Any]) -> list[float]:
    """1.0 for each step before the first wrong one, 0.0 from there on.

    `metadata` has the chain as "expression", like "6 + 7 - 8". ValueError where it has none.
    """
    if "expression" not in metadata:
        raise ValueError(
            f"no 'expression' in the metadata {list(metadata)}; this function scores the steps of "
            "the task chain_sum only"
        )
    wrong = first_wrong_step(metadata["expression"], steps)
    return [float(wrong is None or step < wrong) for step in range(len(steps))]


def first_wrong_step(expression: str, steps: Sequence[str]) -> int | None:
    """The first step (from 0) that does not go on with the computation; None where all do.

    A step that is left out makes the one in its place wrong; what comes after the answer is wrong;
    steps that are missing at the end are not. The semicolon may be missing, blanks do not count.
    ValueError where the expression is no chain of sums.
    """
    expected = _expected(parse_question(f"{expression} ="))
    for number, text in enumerate(steps):
        if number >= len(expected) or _read(text) != expected[number]:
            return number
    return None


Read = tuple[int, str, int, int] | int | None
"""A step's numbers: left, operator, right and result; an answer; or neither."""


def _expected(chain: ChainExpression) -> list[Read]:
    found: list[Read] = []
    left = chain.numbers[0]
    for operator, right in zip(chain.operators, chain.numbers[1:], strict=True):
        result = exact_step(left, operator, right)
        found.append((left, operator, right, result))
        left = result
    return [*found, left]


def _read(text: str) -> Read:
    bare = text.rstrip("; \n").lstrip()
    if step := _STEP.fullmatch(bare):
        left, operator, right, result = step.groups()
        return int(left), operator, int(right), int(result)
    answer = _ANSWER.fullmatch(bare)
    return int(answer[1] or answer[2]) if answer else None
