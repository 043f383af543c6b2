"""What every verifier offers, and the one that a configuration asks for."""

from collections.abc import Callable
from typing import Any, Protocol

from megatron_credit.rewards.config import AnswerSettings, AnyVerifierConfig
from megatron_credit.rewards.find_answer import find_answer
from megatron_credit.rewards.verdict import Verdict


class Verifier(Protocol):
    """Checks answers of one kind. What it raises is no verdict: the pool makes an error of it."""

    def compare(self, found: str, answer: str, metadata: dict[str, Any]) -> Verdict:
        """The verdict on the answer that was found in a response; `answer` is the reference."""
        ...

    def check_reference(self, answer: str, metadata: dict[str, Any]) -> str | None:
        """What is wrong with a reference answer, in words; None: nothing."""
        ...


def find(text: str, config: AnyVerifierConfig) -> str | None:
    """What `compare` gets of a response: its answer, or all of it for a custom function."""
    return find_answer(text, config) if isinstance(config, AnswerSettings) else text


def check(
    text: str, answer: str, metadata: dict[str, Any], config: AnyVerifierConfig
) -> Verdict:
    """The verdict on a response, in this process and without limits; see `VerifierPool`."""
    found = find(text, config)
    if found is None:
        return NO_ANSWER
    return make_verifier(config).compare(found, answer, metadata)


NO_ANSWER = Verdict("unparsed", detail="the response holds no answer")


def make_verifier(config: AnyVerifierConfig) -> Verifier:
    """The verifier of a configuration, with its libraries loaded.

    Raises ValueError when it cannot work: a function or library that is not there.
    """
    return MAKERS[config.kind](config)


def _exact(config: Any) -> Verifier:
    from megatron_credit.rewards.exact import ExactVerifier

    return ExactVerifier(config)


def _numeric(config: Any) -> Verifier:
    from megatron_credit.rewards.numeric import NumericVerifier

    return NumericVerifier(config)


def _choice(config: Any) -> Verifier:
    from megatron_credit.rewards.choice import ChoiceVerifier

    return ChoiceVerifier(config)


def _reasoning_gym(config: Any) -> Verifier:
    from megatron_credit.rewards.gym import GymVerifier

    return GymVerifier(config)


def _math(config: Any) -> Verifier:
    from megatron_credit.rewards.maths.verifier import MathVerifier

    return MathVerifier(config)


def _custom(config: Any) -> Verifier:
    from megatron_credit.rewards.custom import CustomVerifier

    return CustomVerifier(config)


MAKERS: dict[str, Callable[[Any], Verifier]] = {
    "exact": _exact,
    "numeric": _numeric,
    "choice": _choice,
    "reasoning_gym": _reasoning_gym,
    "math": _math,
    "custom": _custom,
}
