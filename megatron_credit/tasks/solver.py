"""Worked solutions of chain sums: by an exact solver, and by a pupil who forgets carries.

A solution reads `6+7=13;13-8=5;<answer>5</answer>`: each step continues the result before it.
Where the question asks for a box it ends in `\\boxed{5}` instead.
"""

import re
from itertools import pairwise
from random import Random
from typing import NamedTuple

from megatron_credit.rewards.answer_tags import CLOSE_TAG, OPEN_TAG

ASK_FOR_BOX = "Put the answer in a box."
OPEN_BOX, CLOSE_BOX = r"\boxed{", "}"

_EXPRESSION = re.compile(r"(?:^|: )([0-9]+(?: [+-] [0-9]+)*) =$")


class ChainExpression(NamedTuple):
    """A chain of sums: `numbers[0] operators[0] numbers[1] operators[1] ..`."""

    numbers: tuple[int, ...]
    operators: tuple[str, ...]


def ask_for_box(question: str) -> str:
    """The same question, to be answered in a box."""
    return f"{question}\n{ASK_FOR_BOX}"


def wants_box(question: str) -> bool:
    """Whether the answer is asked for in a box."""
    return question.endswith(f"\n{ASK_FOR_BOX}")


def parse_question(question: str) -> ChainExpression:
    """The sum that a question such as `..: 6 + 7 - 8 =` asks for."""
    found = _EXPRESSION.search(question.removesuffix(f"\n{ASK_FOR_BOX}"))
    if found is None:
        raise ValueError(f"not a chain sum: {question!r}; expected it to end like '6 + 7 - 8 ='")
    words = found.group(1).split(" ")
    return ChainExpression(tuple(int(word) for word in words[::2]), tuple(words[1::2]))


def exact_step(left: int, operator: str, right: int) -> int:
    """`left operator right`."""
    return left + right if operator == "+" else left - right


def forgetful_step(left: int, operator: str, right: int) -> int:
    """`left operator right` with the carry (or borrow) out of the units forgotten, if there is one.

    The magnitudes are added or subtracted as on paper, so the sign is always the right one.
    """
    exact = exact_step(left, operator, right)
    sign = -1 if exact < 0 else 1
    signed_right = right if operator == "+" else -right
    if (left >= 0) == (signed_right >= 0):
        forgotten = -10 if abs(left) % 10 + right % 10 >= 10 else 0
    else:
        larger, smaller = max(abs(left), right), min(abs(left), right)
        forgotten = 10 if larger % 10 < smaller % 10 else 0
    return exact + sign * forgotten


def exact_solution(question: str) -> str:
    """The worked solution without a mistake."""
    return forgetful_solution(question, forget=0.0, rng=Random(0))


def forgetful_solution(question: str, *, forget: float, rng: Random) -> str:
    """A worked solution where each carry is forgotten with probability `forget`.

    Later steps go on from the wrong result, so a mistake is local to its step.
    """
    numbers, operators = parse_question(question)
    results, steps = [numbers[0]], []
    for operator, right in zip(operators, numbers[1:], strict=True):
        step = forgetful_step if rng.random() < forget else exact_step
        results.append(step(results[-1], operator, right))
        steps.append(_write_step(results[-2], operator, right, results[-1]))
    opening, closing = (OPEN_BOX, CLOSE_BOX) if wants_box(question) else (OPEN_TAG, CLOSE_TAG)
    return "".join(steps) + f"{opening}{results[-1]}{closing}"


def first_wrong_step(text: str, question: str) -> int | None:
    """The first step (from 0) of a worked solution that is not the exact solver's; None if none.

    A missing step is wrong, and so is one too many. With all n steps right, n stands for the
    answer: wrong, missing or followed by more text.
    """
    numbers, operators = parse_question(question)
    exact = exact_solution(question)
    if text == exact:
        return None
    given, expected = split_steps(text), split_steps(exact)
    for index in range(len(operators)):
        if index >= len(given) or given[index] != expected[index]:
            return index
    return len(numbers) - 1


def _write_step(left: int, operator: str, right: int, result: int) -> str:
    return f"{left}{operator}{right}={result};"


def split_steps(text: str) -> list[str]:
    """The steps of a solution, each with its semicolon; what follows the last one is no step."""
    ends = [0, *(found.end() for found in re.finditer(";", text))]
    return [text[start:end] for start, end in pairwise(ends)]
