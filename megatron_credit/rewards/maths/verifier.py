"""The answer is the same mathematical object as the reference."""

import itertools
from typing import Any

from megatron_credit.rewards.config import MathConfig
from megatron_credit.rewards.maths.compare import normal_form, same
from megatron_credit.rewards.maths.notation import to_notation
from megatron_credit.rewards.maths.objects import MAX_CHARS, readings
from megatron_credit.rewards.maths.things import Thing
from megatron_credit.rewards.maths.tokens import Unreadable
from megatron_credit.rewards.verdict import Verdict


class MathVerifier:
    """Compares exactly; docs/verifiers.md has what is equal to what, and why."""

    def __init__(self, config: MathConfig) -> None:
        import math_verify  # noqa: F401 - loaded here, so that no answer pays for it

        self._tolerance = config.rel_tolerance

    def compare(self, found: str, answer: str, metadata: dict[str, Any]) -> Verdict:
        """right, wrong, or unparsed when the answer is no mathematical object."""
        spelled = to_notation(found[: 2 * MAX_CHARS])
        try:
            references = _read_reference(answer)
        except Unreadable:
            if spelled and spelled == to_notation(answer[:MAX_CHARS]):
                return Verdict("right", spelled)  # the same text, whatever it may mean
            raise
        try:
            given = readings(spelled)
        except Unreadable as problem:
            return Verdict("unparsed", detail=str(problem))
        given += _without_unit(spelled, references[0])
        pairs = itertools.product(references, given)
        if any(same(expected, other, tolerance=self._tolerance) for expected, other in pairs):
            return Verdict("right", normal_form(references[0]))
        if given[0].kind == "text" and references[0].kind != "text":
            return Verdict("unparsed", detail=f"{found[:80]!r} are words, the reference is not")
        return Verdict("wrong", normal_form(given[0]))

    def check_reference(self, answer: str, metadata: dict[str, Any]) -> str | None:
        """The reference must be readable."""
        try:
            _read_reference(answer)
        except Unreadable as problem:
            return f"the reference answer {answer[:80]!r} cannot be read: {problem}"
        return None


def _read_reference(answer: str) -> list[Thing]:
    found = readings(to_notation(answer[:MAX_CHARS]))
    if found[0].kind == "false":
        raise Unreadable("it is an equation that does not hold")
    return found


def _without_unit(spelled: str, reference: Thing) -> list[Thing]:
    """The value in front of the reference's unit, where that unit looks like a variable."""
    if reference.kind != "value" or not reference.tag or not spelled.endswith(reference.tag):
        return []
    try:
        value = readings(spelled.removesuffix(reference.tag).strip())[0]
    except Unreadable:
        return []
    return [value]
