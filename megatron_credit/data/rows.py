"""From a row as a file holds it to a prompt's parts, or to what is wrong with it."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from megatron_credit.data.config import ColumnsConfig
from megatron_credit.data.problems import Reason, RowProblem, shown

ROLES = ("system", "user", "assistant")
# Whole floats up to here are exact, so 3.0 may be written 3.
MAX_EXACT_FLOAT = 2**53
DEFAULTS = ColumnsConfig()
MISSING = object()


@dataclass(frozen=True)
class Row:
    """The parts of a prompt that a row says."""

    id: str | None
    """None: the row has no id of its own."""
    messages: list[dict[str, str]]
    answer: str
    metadata: dict[str, Any]


def parse_row(raw: Mapping[str, Any], columns: ColumnsConfig, system_prompt: str | None) -> Row:
    """The row with the system prompt in front; raises RowProblem."""
    messages = parse_question(raw, columns)
    if system_prompt is not None:
        if messages[0]["role"] == "system":
            raise RowProblem(
                "bad messages", "it has a system message, and data.system_prompt adds one"
            )
        messages = [{"role": "system", "content": system_prompt}, *messages]
    return Row(
        id=parse_id(raw, columns.id),
        messages=messages,
        answer=parse_answer(require(raw, columns.answer)) if columns.answer else "",
        metadata=parse_metadata(raw, columns.metadata),
    )


def lookup(raw: Mapping[str, Any], name: str) -> Any:
    """The value of a column, or of a field inside one (a.b); MISSING where there is none."""
    if name in raw:
        return raw[name]
    head, dot, rest = name.partition(".")
    inner = raw.get(head) if dot else None
    return lookup(inner, rest) if isinstance(inner, Mapping) else MISSING


def require(raw: Mapping[str, Any], name: str) -> Any:
    """The value of a column that every row must have; it may be None."""
    value = lookup(raw, name)
    if value is MISSING:
        raise missing(repr(name), raw)
    return value


def missing(names: str, raw: Mapping[str, Any]) -> RowProblem:
    """The problem of a row without the named columns."""
    return RowProblem("missing column", f"{names}; the row has {shown(list(raw))}")


def parse_question(raw: Mapping[str, Any], columns: ColumnsConfig) -> list[dict[str, str]]:
    """The chat messages of a row; a text becomes the user's message."""
    found = {name: lookup(raw, name) for name in (columns.prompt, columns.messages) if name}
    if all(value is MISSING for value in found.values()):
        raise missing("neither " * (len(found) > 1) + " nor ".join(map(repr, found)), raw)
    present = {name: value for name, value in found.items() if value is not MISSING}
    given = [name for name, value in present.items() if value is not None]
    if not given:
        raise RowProblem("empty prompt", f"null in {' and '.join(map(repr, present))}")
    if len(given) == 2:
        raise RowProblem(
            "two prompts",
            f"both {columns.prompt!r} and {columns.messages!r} are filled; set columns.prompt or "
            'columns.messages to "", so that one of them counts',
        )
    value = found[given[0]]
    if not isinstance(value, str) or given[0] == columns.messages:
        return parse_messages(value)
    if not value.strip():
        raise RowProblem("empty prompt", f"it is {shown(value)}")
    return [{"role": "user", "content": value}]


def parse_messages(value: Any) -> list[dict[str, str]]:
    """The chat messages of a list."""
    if not isinstance(value, list):
        raise RowProblem("bad messages", f"expected a list of messages, not {typed(value)}")
    if not value:
        raise RowProblem("empty prompt", "its list of messages is empty")
    messages = [parse_message(number, message) for number, message in enumerate(value, 1)]
    if messages[-1]["role"] != "user":
        raise RowProblem("bad messages", f"the last one is by {messages[-1]['role']}, not by user")
    return messages


def parse_message(number: int, message: Any) -> dict[str, str]:
    """One chat message, role and content alone."""
    if not isinstance(message, Mapping):
        raise RowProblem("bad messages", f"message {number} is {typed(message)}, not an object")
    extra = sorted(
        str(key) for key in message if key not in ("role", "content") and message[key] is not None
    )
    if extra:
        raise RowProblem(
            "bad messages", f"message {number} has {shown(extra)}; only role and content are used"
        )
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        expected = ", ".join(ROLES)
        raise RowProblem(
            "bad messages", f"message {number} has the role {shown(role)}, not one of {expected}"
        )
    if not isinstance(content, str):
        raise RowProblem("bad messages", f"message {number} has {typed(content)} as its content")
    if not content.strip():
        raise RowProblem("empty prompt", f"message {number} has no content")
    return {"role": role, "content": content}


def parse_answer(value: Any) -> str:
    """The reference answer as text."""
    if value is None:
        raise RowProblem("missing answer", "it is null")
    if isinstance(value, str):
        if not value.strip():
            raise RowProblem("missing answer", f"it is {shown(value)}")
        return value
    text = number_text(value)
    if text is None:
        raise RowProblem("answer of another type", f"expected text or a number, not {typed(value)}")
    return text


def number_text(value: Any) -> str | None:
    """The number in digits, 3.0 as 3; None where it is no finite number."""
    # type() and not isinstance(): True is an int
    if type(value) is int:
        return digits(value)
    if type(value) is float and math.isfinite(value):
        whole = value.is_integer() and abs(value) < MAX_EXACT_FLOAT
        return str(int(value)) if whole else repr(value)
    if isinstance(value, Decimal) and value.is_finite():
        return format(value, "f")
    return None


def digits(value: int) -> str | None:
    """The integer in digits; None where it is longer than Python writes (4300 digits)."""
    try:
        return str(value)
    except ValueError:
        return None


def parse_id(raw: Mapping[str, Any], name: str) -> str | None:
    """The row's own id; None where it has none."""
    value = None
    if name:
        value = lookup(raw, name) if name == DEFAULTS.id else require(raw, name)
    if value is None or value is MISSING:
        return None
    text = digits(value) if type(value) is int else value
    if not isinstance(text, str) or not text.strip():
        raise RowProblem("bad id", f"expected text or a whole number, not {typed(value)}")
    return text


def parse_metadata(raw: Mapping[str, Any], names: str | Sequence[str]) -> dict[str, Any]:
    """What the row tells the verifier besides the answer."""
    if not isinstance(names, str):
        return {name: require(raw, name) for name in names}
    value = None
    if names:
        value = lookup(raw, names) if names == DEFAULTS.metadata else require(raw, names)
    if value is None or value is MISSING:
        return {}
    if isinstance(value, str):
        value = from_json(value, "bad metadata")
    if not isinstance(value, dict):
        raise RowProblem("bad metadata", f"expected an object, not {typed(value)}")
    return value


def from_json(text: str, reason: Reason) -> Any:
    """The value of a JSON text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowProblem(reason, f"{shown(text)} is no JSON: {error}") from None


def typed(value: Any) -> str:
    """The value with its type, as a reader of JSON knows it."""
    if value is None:
        return "null"
    names = {dict: "an object", list: "a list", str: "the text", bool: "the boolean"}
    return f"{names.get(type(value), 'the ' + type(value).__name__)} {shown(value)}"
