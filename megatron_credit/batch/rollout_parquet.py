"""Rollout records as Parquet: one row a rollout, one column a field; imports pyarrow."""

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, get_type_hints

import pyarrow as pa
from pyarrow.parquet import ParquetFile, ParquetWriter

from megatron_credit.batch.rollout import Rollout, Span, VersionSpan

ROWS_AT_ONCE = 256
"""Rollouts in memory together, and in a row group."""
VERSION = pa.struct([(name, pa.int64()) for name in VersionSpan._fields])
SPAN = pa.struct([("start", pa.int64()), ("end", pa.int64()), ("score", pa.float64())])
TYPES = {
    str: pa.string(),
    str | None: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    list[int]: pa.list_(pa.int64()),
    list[float]: pa.list_(pa.float64()),
    list[bool]: pa.list_(pa.bool_()),
    list[VersionSpan]: pa.list_(VERSION),
    dict[str, list[float]]: pa.map_(pa.string(), pa.list_(pa.float64())),
    dict[str, list[Span]]: pa.map_(pa.string(), pa.list_(SPAN)),
    dict[str, str]: pa.map_(pa.string(), pa.string()),
    list[dict[str, str]]: pa.list_(pa.map_(pa.string(), pa.string())),
    dict[str, Any]: pa.string(),
}
COLUMNS = pa.schema([(name, TYPES[kind]) for name, kind in get_type_hints(Rollout).items()])


def write_rows(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """One row a record, each with all fields of a rollout."""
    remaining = map(to_row, records)
    with ParquetWriter(path, COLUMNS, compression="zstd") as file:
        while rows := list(islice(remaining, ROWS_AT_ONCE)):
            file.write_table(pa.Table.from_pylist(rows, COLUMNS))


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows, with objects for structs and maps; ValueError where the file is no Parquet."""
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(ROWS_AT_ONCE):
                yield from batch.to_pylist(maps_as_pydicts="strict")
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as Parquet: {error}") from None


def to_row(record: dict[str, Any]) -> dict[str, Any]:
    """The record as pyarrow takes it: structs as objects, maps as pairs, JSON values as text."""
    named_spans = {
        name: [dict(zip(Span._fields, span, strict=True)) for span in spans]
        for name, spans in record["spans"].items()
    }
    return record | {
        "versions": [dict(zip(VersionSpan._fields, v, strict=True)) for v in record["versions"]],
        "spans": list(named_spans.items()),
        "token_values": list(record["token_values"].items()),
        "evidence": list(record["evidence"].items()),
        "messages": [list(message.items()) for message in record["messages"]],
        "template_options": json.dumps(record["template_options"], allow_nan=False),
        "metadata": json.dumps(record["metadata"], allow_nan=False),
    }
