"""Rollouts on disk: JSON lines or Parquet, as the file's suffix says, with the same fields."""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from megatron_credit.batch.rollout import Rollout, Span, VersionSpan
from megatron_credit.errors import writing

SUFFIXES = (".jsonl", ".parquet")


def write_rollouts(path: Path, rollouts: Iterable[Rollout]) -> None:
    """Writes a `.jsonl` or a `.parquet` file, which appears whole or not at all."""
    partial = path.with_suffix(".tmp")
    records = (without_nan(vars(rollout)) for rollout in rollouts)
    is_parquet = check_suffix(path) == ".parquet"
    try:
        with writing(partial):
            (write_parquet if is_parquet else write_lines)(partial, records)
        partial.replace(path)
    finally:
        # On a full disk what there is of it would be in the way of the next attempt.
        partial.unlink(missing_ok=True)


def read_rollouts(path: Path) -> Iterator[Rollout]:
    """The rollouts of such a file, in order.

    ValueError with the file and the line (in Parquet, the row): where it is none.
    """
    if not path.is_file():
        raise ValueError(f"there is no rollout record at {path}")
    is_parquet = check_suffix(path) == ".parquet"
    unit, records = ("row", read_table(path)) if is_parquet else ("line", read_lines(path))
    for place, record in records:
        try:
            yield to_rollout(record)
        except ValueError as error:
            raise ValueError(f"{path}, {unit} {place}: not a rollout record: {error}") from None


def check_suffix(path: Path) -> str:
    """The suffix, one of SUFFIXES; ValueError for others."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: a rollout record is named *{' or *'.join(SUFFIXES)}")
    return path.suffix


def write_parquet(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """One record a row."""
    # Imports pyarrow: not for who writes JSON lines.
    from megatron_credit.batch.rollout_parquet import write_rows

    write_rows(path, records)


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """One JSON object a line."""
    with path.open("w") as lines:
        for record in records:
            lines.write(json.dumps(record, allow_nan=False) + "\n")


def read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Line number and parsed line, blank lines left out."""
    with path.open("rb") as lines:
        for place, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield place, json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{path}, line {place} is not JSON: {error}") from None


def read_table(path: Path) -> Iterator[tuple[int, Any]]:
    """Row number, from 1, and row."""
    from megatron_credit.batch.rollout_parquet import read_rows

    return enumerate(read_rows(path), 1)


def to_rollout(record: Any) -> Rollout:
    """The rollout of a parsed line; ValueError says which field is missing, unknown or wrong."""
    if not isinstance(record, dict):
        raise ValueError(f"expected an object with named fields, got {shortened(record)}")
    check_names(record.keys())
    rollout = Rollout(**{name: read_field(name, value) for name, value in record.items()})
    check_lengths(rollout)
    return rollout


def check_names(names: Iterable[str]) -> None:
    """Every field that a rollout needs is there, and no other."""
    missing = sorted(REQUIRED.difference(names))
    if missing:
        raise ValueError(f"missing field {', '.join(missing)}")
    unknown = sorted(set(names).difference(FIELDS))
    if unknown:
        raise ValueError(f"unknown field {', '.join(unknown)}; known are {', '.join(FIELDS)}")


def read_field(name: str, value: Any) -> Any:
    """The value of a field as `Rollout` holds it."""
    form = FIELDS[name]
    try:
        return form.read(value)
    except TypeError:
        raise ValueError(
            f"field {name} holds {shortened(value)}; expected {form.meaning}"
        ) from None


def check_lengths(rollout: Rollout) -> None:
    """What belongs to response tokens has one entry for each."""
    expected = len(rollout.response_ids)
    lengths = {"logprobs": len(rollout.logprobs), "mask": len(rollout.mask)}
    if rollout.advantages:
        lengths["advantages"] = len(rollout.advantages)
    lengths |= {f"token_values.{k}": len(values) for k, values in rollout.token_values.items()}
    for name, length in lengths.items():
        if length != expected:
            raise ValueError(f"{name} has {length} entries for {expected} response tokens")


def exactly(kind: type) -> Callable[[Any], Any]:
    """A reader of values of this type; True is no integer."""

    def read(value: Any) -> Any:
        if type(value) is not kind:
            raise TypeError
        return value

    return read


def list_of(kind: type) -> Callable[[Any], list]:
    """A reader of lists whose items are all of this type."""

    def read(value: Any) -> list:
        if type(value) is not list or not set(map(type, value)) <= {kind}:
            raise TypeError
        return value

    return read


def dict_of(read_item: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
    """A reader of objects with named items."""

    def read(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise TypeError
        return {name: read_item(item) for name, item in value.items()}

    return read


def list_of_dicts(value: Any) -> list[dict[str, str]]:
    """A list of objects with named texts."""
    return [dict_of(exactly(str))(item) for item in list_of(dict)(value)]


def json_object(value: Any) -> dict[str, Any]:
    """An object with named JSON values; Parquet has it as its JSON text."""
    if type(value) is str:
        try:
            value = json.loads(value)
        except ValueError:
            raise TypeError from None
    return exactly(dict)(value)


def number(value: float | None) -> float:
    """NaN for null."""
    return math.nan if value is None else value


def real(value: Any) -> float:
    """A number; NaN for null."""
    if type(value) not in NUMBERS:
        raise TypeError
    return float(number(value))


def reals(value: Any) -> list[float]:
    """Numbers; NaN for each null."""
    if type(value) is not list or not set(map(type, value)) <= NUMBERS:
        raise TypeError
    return [float(number(item)) for item in value]


def text_or_none(value: Any) -> str | None:
    """A text, or null."""
    return None if value is None else exactly(str)(value)


def versions(value: Any) -> list[VersionSpan]:
    """Spans of weight versions, each an array or an object."""
    return [VersionSpan(*map(exactly(int), items(VersionSpan, span))) for span in value]


def spans(value: Any) -> list[Span]:
    """Spans with scores, each an array or an object."""
    found = [items(Span, span) for span in value]
    return [Span(exactly(int)(a), exactly(int)(b), real(score)) for a, b, score in found]


def items(kind: type[VersionSpan] | type[Span], value: Any) -> list:
    """The items of a tuple that was written as an array or as an object."""
    found = [value.get(name) for name in kind._fields] if isinstance(value, dict) else value
    if type(found) is not list or len(found) != len(kind._fields):
        raise TypeError
    return found


def without_nan(value: Any) -> Any:
    """The value with null, which JSON has, in place of NaN, which it has not."""
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return value


def shortened(value: Any) -> str:
    """The value as an error message can show it."""
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


class Form(NamedTuple):
    """How values of one type are read."""

    meaning: str
    read: Callable[[Any], Any]
    """TypeError for other values."""


NUMBERS = {int, float, type(None)}
FORMS = {
    str: Form("a text", exactly(str)),
    str | None: Form("a text or null", text_or_none),
    int: Form("an integer", exactly(int)),
    float: Form("a number or null", real),
    list[int]: Form("a list of integers", list_of(int)),
    list[float]: Form("a list of numbers", reals),
    list[bool]: Form("a list of true and false", list_of(bool)),
    list[VersionSpan]: Form("a list of [version, start, end]", versions),
    dict[str, list[float]]: Form("lists of numbers by name", dict_of(reals)),
    dict[str, list[Span]]: Form("lists of [start, end, score] by name", dict_of(spans)),
    dict[str, str]: Form("texts by name", dict_of(exactly(str))),
    list[dict[str, str]]: Form("a list of texts by name", list_of_dicts),
    dict[str, Any]: Form("values by name", json_object),
}
FIELDS = {name: FORMS[kind] for name, kind in get_type_hints(Rollout).items()}
REQUIRED = {
    field.name
    for field in fields(Rollout)
    if field.default is MISSING and field.default_factory is MISSING
}
