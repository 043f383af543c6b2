"""The answer is the reference, character by character."""

from typing import Any

from megatron_credit.rewards.config import ExactConfig
from megatron_credit.rewards.verdict import Verdict


class ExactVerifier:
    """Compares texts after the normalisation that the configuration asks for."""

    def __init__(self, config: ExactConfig) -> None:
        self._config = config

    def compare(self, found: str, answer: str, metadata: dict[str, Any]) -> Verdict:
        """right or wrong."""
        normal = self._normal(found)
        return Verdict("right" if normal == self._normal(answer) else "wrong", normal)

    def check_reference(self, answer: str, metadata: dict[str, Any]) -> str | None:
        """An empty reference can never be found."""
        return None if self._normal(answer) else "the reference answer is empty"

    def _normal(self, text: str) -> str:
        if self._config.ignore_space:
            text = " ".join(text.split())
        if self._config.ignore_case:
            text = text.casefold()
        if self._config.ignore_final_dot:
            text = text.removesuffix(".")
        return text
