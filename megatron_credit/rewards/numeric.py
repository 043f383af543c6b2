"""The answer is the reference's number."""

from fractions import Fraction
from typing import Any

from megatron_credit.rewards.config import NumericConfig
from megatron_credit.rewards.numbers import read_number
from megatron_credit.rewards.verdict import Verdict


class NumericVerifier:
    """Compares exact numbers; a unit counts only where the reference and the answer have one."""

    def __init__(self, config: NumericConfig) -> None:
        self._abs = Fraction(config.abs_tolerance)
        self._rel = Fraction(config.rel_tolerance)

    def compare(self, found: str, answer: str, metadata: dict[str, Any]) -> Verdict:
        """right, wrong, or unparsed when the answer is no number."""
        given, reference = read_number(found), read_number(answer)
        if reference is None:
            raise ValueError(self.check_reference(answer, metadata))
        if given is None:
            return Verdict("unparsed", detail=f"{found[:80]!r} is not a number")
        allowed = max(self._abs, self._rel * abs(reference.value))
        near = abs(given.value - reference.value) <= allowed
        same_unit = not (given.unit and reference.unit) or given.unit == reference.unit
        return Verdict("right" if near and same_unit else "wrong", str(given.value))

    def check_reference(self, answer: str, metadata: dict[str, Any]) -> str | None:
        """The reference must be a number."""
        if read_number(answer) is None:
            return f"the reference answer {answer[:80]!r} is not a number"
        return None
