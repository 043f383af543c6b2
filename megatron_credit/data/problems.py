"""What is wrong with a row, in words, and how often."""

import reprlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

MAX_LISTED = 20
# Not repr(): a value of a broken row may be huge, or nested so deep that repr() fails.
_SHORT = reprlib.Repr()
_SHORT.maxstring, _SHORT.maxother, _SHORT.maxlist, _SHORT.maxlevel = 60, 60, 12, 3

Reason = Literal[
    "bad UTF-8",
    "not a JSON object",
    "row too large",
    "unreadable value",
    "missing column",
    "empty prompt",
    "two prompts",
    "bad messages",
    "missing answer",
    "answer of another type",
    "bad id",
    "duplicate id",
    "bad metadata",
    "refused by the chat template",
    "answer the verifier cannot read",
]


class RowProblem(ValueError):
    """A row cannot be used; `reason` is what is counted, the message says it for this row."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason: Reason = reason


@dataclass(frozen=True)
class BadRow:
    """A malformed row: where it stands and what is wrong with it."""

    file: Path
    row: int
    """From 1: the line of a JSONL file, else the number of the row."""
    reason: Reason
    detail: str

    def __str__(self) -> str:
        return f"{self.file}, row {self.row}: {self.reason}: {self.detail}"


@dataclass
class BadRows:
    """Counts of malformed rows, and the first of them."""

    counts: Counter[Reason] = field(default_factory=Counter)
    first: list[BadRow] = field(default_factory=list)

    def add(self, file: Path, row: int, problem: RowProblem) -> None:
        """Counts the row; it is listed while few are."""
        self.counts[problem.reason] += 1
        if len(self.first) < MAX_LISTED:
            self.first.append(BadRow(file, row, problem.reason, str(problem)))


def listing(all_bad: Iterable[BadRows]) -> str:
    """The first malformed rows, a line each, and a last line with the count by reason."""
    counts: Counter[Reason] = Counter()
    rows: list[BadRow] = []
    for bad in all_bad:
        counts += bad.counts
        rows += bad.first
    lines = [f"  {row}" for row in rows[:MAX_LISTED]]
    if counts.total() > len(lines):
        lines.append(f"  and {counts.total() - len(lines)} more")
    by_reason = ", ".join(f"{count} {reason}" for reason, count in counts.most_common())
    return "\n".join([*lines, f"  in all: {by_reason}"])


def shown(value: Any) -> str:
    """The value in an error message: its beginning will do."""
    return _SHORT.repr(value)
