"""Configuration of the verifiers and of the processes they run in; light to import."""

import difflib
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from megatron_credit.settings import Settings

FUNCTION_PATH = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
"""package.module:function."""
AnswerPlace = Literal["auto", "boxed", "tags", "marker", "last_line", "whole"]


class AnswerSettings(Settings):
    """Where the answer stands in a response."""

    answer_in: AnswerPlace = "auto"
    r"""boxed: the last \boxed{..}; tags: the last <answer>..</answer>; marker: what follows the
    last "answer is", "Answer:" or "####"; last_line: the last line that is not empty; whole:
    everything; auto: the last box or tag, else the marker, else the last line."""
    needs_think_end: bool = False
    """A response without </think> holds no answer: for chat templates that open <think> in the
    prompt. Whatever this says, nothing before the last </think> is an answer."""


class ExactConfig(AnswerSettings):
    """The answer is the reference, character by character."""

    kind: Literal["exact"] = "exact"
    """Which verifier this is."""
    ignore_case: bool = False
    """Upper and lower case are the same."""
    ignore_space: bool = True
    """White space around the answer does not count, and a run of it counts as one blank."""
    ignore_final_dot: bool = False
    """A full stop at the end does not count."""


class NumericConfig(AnswerSettings):
    """The answer is the reference's number, in whatever way it is written."""

    kind: Literal["numeric"] = "numeric"
    """Which verifier this is."""
    abs_tolerance: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Largest distance from the reference that is right."""
    rel_tolerance: float = Field(0.0, ge=0, lt=1)
    """Largest distance from the reference that is right, as a share of the reference; the larger of
    the two tolerances counts."""


class ChoiceConfig(AnswerSettings):
    """The answer is the letter of the reference's choice, or the choice's text."""

    kind: Literal["choice"] = "choice"
    """Which verifier this is."""
    letters: str = Field("ABCDEFGHIJKLMNOPQRSTUVWXYZ", pattern=r"^[A-Z]{2,26}$")
    """Letters of the choices, in order."""
    choices_key: str = "choices"
    """The metadata that holds the texts of the choices, a list or {letter: text}; without it only
    letters are answers."""


class ReasoningGymConfig(AnswerSettings):
    """reasoning-gym's own score of the answer is full marks; partial marks are wrong."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    """Which verifier this is."""
    dataset: str = ""
    """Name of the reasoning-gym dataset; empty: the entry's metadata says it."""
    entry_key: str = ""
    """The metadata that holds the entry {question, answer, metadata}; empty: the metadata of the
    row is the entry's own metadata."""


class MathConfig(AnswerSettings):
    """The answer is the same mathematical object as the reference."""

    kind: Literal["math"] = "math"
    """Which verifier this is."""
    rel_tolerance: float = Field(0.0, ge=0, lt=1)
    """Largest distance of a real number from the reference that is right, as a share of the
    reference; 0 compares exactly."""


class CustomConfig(Settings):
    """A function of the user: function(text, answer, metadata) -> bool, 0, 1 or Verdict."""

    kind: Literal["custom"] = "custom"
    """Which verifier this is."""
    path: str = Field(pattern=FUNCTION_PATH)
    """package.module:function."""


KINDS = ("exact", "numeric", "choice", "reasoning_gym", "math", "custom")


def _spelled_out(value: Any) -> Any:
    """The table that a plain string stands for: a kind, or the path of a function."""
    if isinstance(value, str):
        value = {"kind": "custom", "path": value} if ":" in value else {"kind": value}
    if isinstance(value, dict) and value.get("kind", "") not in KINDS:
        raise ValueError(_unknown_kind(value))
    return value


def _unknown_kind(table: dict[str, Any]) -> str:
    if "kind" not in table:
        return f"a verifier's table needs kind = one of {', '.join(KINDS)}"
    near = difflib.get_close_matches(str(table["kind"]), KINDS, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(KINDS)}"
    return f"no verifier is called {table['kind']!r}; {hint} (a function is package.module:name)"


AnyVerifierConfig = (
    ExactConfig | NumericConfig | ChoiceConfig | ReasoningGymConfig | MathConfig | CustomConfig
)
VerifierConfig = Annotated[
    AnyVerifierConfig, Field(discriminator="kind"), BeforeValidator(_spelled_out)
]
"""A verifier's table, or a string: a kind with its defaults, or the path of a custom function."""


class PoolConfig(Settings):
    """The processes that check answers."""

    workers: int | None = Field(None, ge=1, le=256)
    """Processes that check answers, besides one in reserve for an answer that hangs; unset: one a
    core, at most 16."""
    time_limit_s: float = Field(10.0, gt=0, le=3600)
    """Seconds that one answer may take; then its process is killed and there is no verdict."""
    memory_mib: int = Field(4096, ge=512)
    """Address space of one process, in MiB; a verifier that needs more gives no verdict."""
    start_limit_s: float = Field(120.0, gt=0)
    """Seconds that a process may take to load the verifiers."""
