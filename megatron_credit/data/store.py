"""Vetted rows on disk: a memory-mapped `datasets.Dataset`, so that millions of them need no memory.

Shape letter: R rows.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from megatron_credit.batch.rollout import Prompt

if TYPE_CHECKING:
    from datasets import Dataset


class StoredRow(NamedTuple):
    """One row of a store: the texts of a prompt and where it came from."""

    id: str
    messages: str
    """JSON."""
    answer: str
    metadata: str
    """JSON."""
    file: int
    """Number of the file in its source."""
    row: int
    id_hash: int
    question_hash: int
    num_tokens: int
    """Length of the prompt in the chat template."""


class StoreWriter:
    """Writes a store batch by batch."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        from datasets.arrow_writer import ArrowWriter

        text, number, digest = pa.large_string(), pa.int64(), pa.uint64()
        self._schema = pa.schema(
            {
                "id": text,
                "messages": text,
                "answer": text,
                "metadata": text,
                "file": number,
                "row": number,
                "id_hash": digest,
                "question_hash": digest,
                "num_tokens": number,
            }
        )
        self._path = path
        self._writer = ArrowWriter(schema=self._schema, path=str(path))

    def write(self, rows: Iterable[StoredRow]) -> None:
        """Appends rows."""
        import pyarrow as pa

        records = [row._asdict() for row in rows]
        if records:
            self._writer.write_table(pa.Table.from_pylist(records, schema=self._schema))

    def finish(self) -> "Dataset":
        """All rows, mapped into memory."""
        from datasets import Dataset

        self._writer.finalize()
        return Dataset.from_file(str(self._path))


class PromptTable:
    """The prompts of a source: a store, and which of its rows count."""

    def __init__(self, name: str, store: "Dataset", kept_R: np.ndarray | None = None) -> None:
        self.name = name
        self._store = store
        self._kept_R = np.arange(len(store)) if kept_R is None else kept_R

    def __len__(self) -> int:
        return len(self._kept_R)

    def column_R(self, name: str) -> np.ndarray:
        """A column of numbers."""
        return self._store.data.column(name).to_numpy()[self._kept_R]

    def only(self, chosen_R: np.ndarray) -> Self:
        """The rows where `chosen_R` is True."""
        return type(self)(self.name, self._store, self._kept_R[chosen_R])

    def prompt(self, number: int, *, source: str, template_options: dict[str, bool]) -> Prompt:
        """Prompt `number` of the table."""
        row = self._store[int(self._kept_R[number])]
        return Prompt(
            id=row["id"],
            messages=json.loads(row["messages"]),
            answer=row["answer"],
            metadata=json.loads(row["metadata"]),
            source=source,
            template_options=template_options,
        )


def text_hash(text: str) -> int:
    """64 bits that differ between texts: of a million, two coincide once in 4 * 10^7 data sets."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def question_hash(messages: list[dict[str, str]]) -> int:
    """The same for questions that differ in white space, case or system message alone."""
    asked = "\n".join(
        f"{message['role']}: {message['content']}"
        for message in messages
        if message["role"] != "system"
    )
    return text_hash(" ".join(asked.casefold().split()))
