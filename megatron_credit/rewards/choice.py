"""The answer is the letter of the reference's choice, or the choice's text."""

import re
from typing import Any

from megatron_credit.rewards.config import ChoiceConfig
from megatron_credit.rewards.verdict import Verdict

MARKUP = re.compile(r"\\(?:text|mathrm|textbf|mathbf|boxed)\s*(?=\{)|\\[()\[\]]|[{}$*_`]")
LEAD = re.compile(
    r"(?:the\s+)?(?:correct\s+)?(?:answer|option|choice)\s*(?:is\b|:|=)?\s*", re.IGNORECASE
)
LETTER = re.compile(r"[(\[]?\s*([A-Za-z])\s*[)\]]?\s*(?:[.:,)-]+\s*|\s+(?=\S)|$)")


class ChoiceVerifier:
    """Finds which choice an answer names: `B`, `(B)`, `B.`, `**B**`, `B: Paris`, or `Paris`."""

    def __init__(self, config: ChoiceConfig) -> None:
        self._config = config

    def compare(self, found: str, answer: str, metadata: dict[str, Any]) -> Verdict:
        """right, wrong, or unparsed when the answer names no choice or more than one."""
        choices = self._choices(metadata)
        reference = self._letter(answer, choices)
        if reference is None:
            raise ValueError(self.check_reference(answer, metadata))
        given = self._letter(found, choices)
        if given is None:
            return Verdict("unparsed", detail=f"{found[:80]!r} names no choice")
        return Verdict("right" if given == reference else "wrong", given)

    def check_reference(self, answer: str, metadata: dict[str, Any]) -> str | None:
        """The reference must name one of the choices."""
        choices = self._choices(metadata)
        if self._letter(answer, choices) is None:
            known = ", ".join(choices) if choices else self._config.letters
            return f"the reference answer {answer[:80]!r} names none of the choices {known}"
        return None

    def _choices(self, metadata: dict[str, Any]) -> dict[str, str]:
        """The texts of the choices by letter; empty where the metadata has none."""
        key = self._config.choices_key
        texts = metadata.get(key) or {}
        if isinstance(texts, list):
            if len(texts) > len(self._config.letters):
                raise ValueError(
                    f"metadata[{key!r}] has {len(texts)} choices for the "
                    f"{len(self._config.letters)} letters of the verifier; give it more letters"
                )
            texts = dict(zip(self._config.letters, texts, strict=False))
        if not isinstance(texts, dict):
            raise ValueError(f"metadata[{key!r}] must be a list or a table, got {texts!r}")
        return {str(letter).upper(): str(text) for letter, text in texts.items()}

    def _letter(self, answer: str, choices: dict[str, str]) -> str | None:
        """The letter of the only choice that the answer names."""
        plain = _plain(answer)
        named = [letter for letter, text in choices.items() if _plain(text) == plain]
        if len(named) == 1:
            return named[0]
        match = LETTER.match(plain)
        if match is None or match[1].upper() not in (choices or self._config.letters):
            return None
        letter, rest = match[1].upper(), plain[match.end() :].strip()
        # "A" can be the article: more text than the letter must be the text of that choice.
        if rest and rest != _plain(choices.get(letter, "")):
            return None
        return letter


def _plain(text: str) -> str:
    """The text without markup, words that only lead to the answer, and final punctuation."""
    text = " ".join(MARKUP.sub("", text).split())
    lead = LEAD.match(text)
    # A choice may itself begin with such a word, and then something follows it.
    text = text[lead.end() :] if lead and lead.end() < len(text) else text
    return text.rstrip(" .;,!").casefold()
