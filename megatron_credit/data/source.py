"""One source: its files read, every row vetted, the good ones stored."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megatron_credit.data.chat import prompt_lengths
from megatron_credit.data.config import DataConfig, SourceConfig
from megatron_credit.data.files import RawRow, find_files, read_rows, too_large
from megatron_credit.data.fingerprint import file_digest
from megatron_credit.data.problems import RowProblem
from megatron_credit.data.report import SourceReport, Split
from megatron_credit.data.rows import Row, parse_row
from megatron_credit.data.store import (
    PromptTable,
    StoredRow,
    StoreWriter,
    question_hash,
    text_hash,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Rows that are vetted together: enough for the tokenizer, little enough for the memory.
BATCH_ROWS = 512
BATCH_BYTES = 32_000_000

CheckReferences = Callable[[SourceConfig, Sequence[tuple[str, dict[str, Any]]]], list[str | None]]
"""What is wrong with each (reference answer, metadata) of a source; None: nothing."""


@dataclass(frozen=True)
class Vetting:
    """What is the same for the rows of all sources."""

    config: DataConfig
    tokenizer: "PreTrainedTokenizerBase"
    template_options: dict[str, bool]
    check_references: CheckReferences


class Candidate(NamedTuple):
    """A well-formed row that waits for the tokenizer and the verifier."""

    file: int
    number: int
    row: Row
    id: str
    messages: str
    metadata: str
    num_bytes: int


@dataclass(frozen=True)
class LoadedSource:
    """A source with its rows."""

    config: SourceConfig
    files: list[Path]
    digests: list[str]
    """Of the bytes of each file."""
    table: PromptTable
    report: SourceReport

    def column_R(self, name: str) -> np.ndarray:
        """A column of numbers of the table."""
        return self.table.column_R(name)

    def only(self, chosen_R: np.ndarray) -> "LoadedSource":
        """The source with some of its rows."""
        return replace(self, table=self.table.only(chosen_R))

    def as_held_out(self, chosen_R: np.ndarray) -> "LoadedSource":
        """Some of the rows as a source of held-out prompts, with a report of its own."""
        report = SourceReport(self.config.name, "eval", read=int(chosen_R.sum()))
        return replace(self.only(chosen_R), report=report)


def read_source(source: SourceConfig, split: Split, vetting: Vetting, path: Path) -> LoadedSource:
    """The good rows of a source, stored at `path`; what became of the others is in the report."""
    files = find_files(source.path)
    digests = list(map(file_digest, files))
    report = SourceReport(source.name, split)
    writer = StoreWriter(path)
    for batch in batches(candidates(source, files, report, vetting.config)):
        writer.write(vetted(batch, source, files, report, vetting))
    table = PromptTable(source.name, writer.finish())
    return without_repeated_ids(LoadedSource(source, files, digests, table, report))


def candidates(
    source: SourceConfig, files: list[Path], report: SourceReport, config: DataConfig
) -> Iterator[Candidate]:
    """The well-formed rows of the files; raises ValueError for an unreadable or empty file."""
    columns = source.columns.top_level
    for file_number, file in enumerate(files):
        before = report.read
        prefix = f"{source.name}/{file_number + 1}" if len(files) > 1 else source.name
        for raw in read_rows(file, columns, config.max_row_bytes):
            report.read += 1
            try:
                row = parse_row(unwrap(raw), source.columns, config.system_prompt)
                name = f"{prefix}/{raw.number}" if row.id is None else f"{source.name}/{row.id}"
                yield candidate(file_number, raw.number, row, name, config.max_row_bytes)
            except RowProblem as problem:
                report.bad.add(file, raw.number, problem)
        if report.read == before:
            raise ValueError(f"{file} has no rows; remove it from data.{report.split}")


def unwrap(raw: RawRow) -> Any:
    """What the file holds; raises its RowProblem."""
    if isinstance(raw.value, RowProblem):
        raise raw.value
    return raw.value


def candidate(file: int, number: int, row: Row, name: str, max_bytes: int) -> Candidate:
    """The row in the form in which it is stored; raises RowProblem."""
    try:
        messages = json.dumps(row.messages, ensure_ascii=False)
        metadata = json.dumps(row.metadata, ensure_ascii=False)
        num_bytes = sum(len(text.encode()) for text in (name, messages, row.answer, metadata))
    except UnicodeEncodeError as error:
        raise RowProblem("bad UTF-8", f"half a surrogate pair: {error.reason}") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise RowProblem("bad metadata", f"it is not plain JSON: {error}") from None
    if num_bytes > max_bytes:
        raise too_large(num_bytes, max_bytes)
    return Candidate(file, number, row, name, messages, metadata, num_bytes)


def batches(rows: Iterator[Candidate]) -> Iterator[list[Candidate]]:
    """The rows in lists of bounded length and size."""
    batch: list[Candidate] = []
    num_bytes = 0
    for row in rows:
        batch.append(row)
        num_bytes += row.num_bytes
        if len(batch) == BATCH_ROWS or num_bytes >= BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def vetted(
    batch: list[Candidate],
    source: SourceConfig,
    files: list[Path],
    report: SourceReport,
    vetting: Vetting,
) -> Iterator[StoredRow]:
    """The rows of the batch that the chat template and the verifier take and that are short enough.

    A row that is too long is not malformed, whatever else it is.
    """
    longest = vetting.config.max_prompt_tokens
    prompts = [found.row.messages for found in batch]
    lengths = prompt_lengths(vetting.tokenizer, prompts, vetting.template_options)
    answers = [(found.row.answer, found.row.metadata) for found in batch]
    complaints = vetting.check_references(source, answers)
    for found, length, complaint in zip(batch, lengths, complaints, strict=True):
        if isinstance(length, RowProblem):
            report.bad.add(files[found.file], found.number, length)
        elif longest is not None and length > longest:
            report.too_long += 1
        elif complaint is not None:
            problem = RowProblem("answer the verifier cannot read", complaint)
            report.bad.add(files[found.file], found.number, problem)
        else:
            yield stored(found, length)


def stored(found: Candidate, length: int) -> StoredRow:
    """The row as it is written."""
    return StoredRow(
        id=found.id,
        messages=found.messages,
        answer=found.row.answer,
        metadata=found.metadata,
        file=found.file,
        row=found.number,
        id_hash=text_hash(found.id),
        question_hash=question_hash(found.row.messages),
        num_tokens=length,
    )


def without_repeated_ids(source: LoadedSource) -> LoadedSource:
    """The source without the rows whose id an earlier row has; they are malformed."""
    first_R = first_with_same(source.column_R("id_hash"))
    new_R = first_R == np.arange(len(first_R))
    file_R, row_R = source.column_R("file"), source.column_R("row")
    for number in np.flatnonzero(~new_R):
        first = first_R[number]
        detail = f"row {row_R[first]} of {source.files[file_R[first]]} has the same id"
        file = source.files[file_R[number]]
        source.report.bad.add(file, int(row_R[number]), RowProblem("duplicate id", detail))
    return source.only(new_R)


def first_with_same(value_R: np.ndarray) -> np.ndarray:
    """For each row the number of the first row with the same value: [R]."""
    _, first_U, unique_R = np.unique(value_R, return_index=True, return_inverse=True)
    return first_U[unique_R]
