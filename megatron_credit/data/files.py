"""Rows of files, one after the other, each with its number and its own problem.

The readers of the datasets library stop at the first bad value of a file and do not say in which
row it stands, so lines are read here, and Parquet and Arrow files through pyarrow.
"""

import glob
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from megatron_credit.data.problems import RowProblem, shown

SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Without this look pyarrow takes a stream that lost its last batches for a whole one.
STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
# Rows of a Parquet or Arrow file that are turned into Python values together.
ROWS_PER_BATCH = 256


class RawRow(NamedTuple):
    """What a file holds as its row `number` (from 1; for lines of JSON the line)."""

    number: int
    value: Mapping[str, Any] | RowProblem


def find_files(path: Path) -> list[Path]:
    """The files of a path or pattern, in the order of their names; raises ValueError."""
    if path.is_dir():
        raise ValueError(f"{path} is a directory; name its files, as in {path}/*.parquet")
    files = [path] if path.is_file() else [Path(name) for name in sorted(_matches(path))]
    if not files:
        raise ValueError(f"no file is called or matches {path.absolute()}")
    for file in files:
        if file.suffix not in SUFFIXES:
            raise ValueError(f"{file} ends in none of {', '.join(SUFFIXES)}, so it is not read")
    return files


def _matches(path: Path) -> list[str]:
    return [name for name in glob.glob(str(path), recursive=True) if Path(name).is_file()]


def read_rows(file: Path, columns: Collection[str], max_bytes: int) -> Iterator[RawRow]:
    """The rows of a file, with at least the named columns; raises ValueError: it is not readable.

    Blank lines are no rows.
    """
    try:
        if file.suffix == ".parquet":
            yield from table_rows(_parquet_batches(file, columns))
        elif file.suffix == ".arrow":
            yield from table_rows(_arrow_batches(file, columns))
        elif file.suffix == ".json" and _first_byte(file) == b"[":
            yield from array_rows(file.read_bytes())
        else:
            with file.open("rb") as lines:
                yield from line_rows(lines, max_bytes)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    except BrokenFile as error:
        raise ValueError(f"{file} {error}") from None


class BrokenFile(ValueError):
    """A file cannot be read as what its name says; the message goes behind its name."""


def _first_byte(file: Path) -> bytes:
    """The first byte that is no white space, or nothing."""
    with file.open("rb") as opened:
        return opened.read(4096).removeprefix(BYTE_ORDER_MARK).lstrip()[:1]


def line_rows(lines: BinaryIO, max_bytes: int) -> Iterator[RawRow]:
    """A row for each line that is not blank."""
    number = 0
    while line := lines.readline(max_bytes + 2):
        number += 1
        size = len(line)
        while not line.endswith(b"\n") and (more := lines.readline(1 << 20)):
            size += len(more)
            line = more
        if size > max_bytes + 2:
            yield RawRow(number, too_large(size, max_bytes))
            continue
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        if line.strip():
            yield RawRow(number, parse_line(line))


def too_large(size: int, max_bytes: int) -> RowProblem:
    """The problem of a row with more bytes than are allowed."""
    return RowProblem("row too large", f"{size:,} bytes, and data.max_row_bytes = {max_bytes:,}")


def parse_line(line: bytes) -> Mapping[str, Any] | RowProblem:
    """The JSON object of a line, or what is wrong with it."""
    try:
        return as_row(json.loads(line.decode()))
    except UnicodeDecodeError as error:
        return RowProblem("bad UTF-8", f"byte {error.start + 1} of the line: {error.reason}")
    except json.JSONDecodeError as error:
        return RowProblem("not a JSON object", f"{error.msg} at character {error.pos + 1}")
    except (ValueError, RecursionError) as error:
        return RowProblem("not a JSON object", str(error))


def as_row(value: Any) -> Mapping[str, Any] | RowProblem:
    """The value if it is an object, else what it is instead."""
    if isinstance(value, dict):
        return value
    return RowProblem("not a JSON object", f"it is {shown(value)}")


def array_rows(content: bytes) -> Iterator[RawRow]:
    """The objects of a file that is one JSON array, which is read whole."""
    try:
        values = json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BrokenFile(f"is not UTF-8 at byte {error.start + 1}: {error.reason}") from None
    except (ValueError, RecursionError) as error:
        raise BrokenFile(f"is not valid JSON: {error}") from None
    for number, value in enumerate(values, 1):
        yield RawRow(number, as_row(value))


def _parquet_batches(file: Path, columns: Collection[str]) -> Iterator[Any]:
    """Record batches with the columns that are there."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as opened:
            present = _present(opened.schema_arrow.names, columns)
            yield from opened.iter_batches(batch_size=ROWS_PER_BATCH, columns=present)
    except (pa.ArrowException, OSError) as error:
        raise BrokenFile(f"cannot be read as Parquet: {error}") from None


def _arrow_batches(file: Path, columns: Collection[str]) -> Iterator[Any]:
    """Record batches, memory-mapped, with the columns that are there."""
    import pyarrow as pa

    try:
        with pa.memory_map(str(file)) as mapped:
            for batch in _record_batches(mapped):
                present = batch.select(_present(batch.schema.names, columns))
                present.validate()
                for start in range(0, len(batch), ROWS_PER_BATCH):
                    yield present.slice(start, ROWS_PER_BATCH)
    except (pa.ArrowException, OSError) as error:
        raise BrokenFile(f"cannot be read as Arrow: {error}") from None


def _record_batches(mapped: Any) -> Iterator[Any]:
    """The batches of either of Arrow's two forms: what datasets saves, and Feather files."""
    import pyarrow as pa

    if mapped.read(6) == b"ARROW1":
        opened = pa.ipc.open_file(mapped)
        yield from map(opened.get_batch, range(opened.num_record_batches))
    else:
        if mapped.read_at(len(STREAM_END), max(mapped.size() - len(STREAM_END), 0)) != STREAM_END:
            raise BrokenFile("is cut short: the mark that ends an Arrow stream is missing")
        mapped.seek(0)
        yield from pa.ipc.open_stream(mapped)


def _present(names: list[str], columns: Collection[str]) -> list[str]:
    """Those of the file's columns that are asked for."""
    present = [name for name in names if name in columns]
    if not present:
        raise BrokenFile(f"has the columns {shown(names)}, and none of {shown(sorted(columns))}")
    if len(set(present)) < len(present):
        raise BrokenFile(f"has two columns of one name among {', '.join(present)}")
    return present


def table_rows(batches: Iterator[Any]) -> Iterator[RawRow]:
    """The rows of record batches."""
    number = 0
    for batch in batches:
        for row, value in enumerate(batch_rows(batch), number + 1):
            yield RawRow(row, value)
        number += len(batch)


def batch_rows(batch: Any) -> list[Mapping[str, Any] | RowProblem]:
    """The rows of a record batch; one by one where a value of it cannot become a Python value."""
    try:
        return batch.to_pylist()
    except UnicodeDecodeError as error:
        problem = RowProblem("bad UTF-8", f"a text has a wrong byte: {error.reason}")
    except (ValueError, OverflowError, LookupError) as error:
        problem = RowProblem("unreadable value", str(error))
    if len(batch) == 1:
        return [problem]
    return [row for start in range(len(batch)) for row in batch_rows(batch.slice(start, 1))]
