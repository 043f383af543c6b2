"""How many rows were read, and what became of them."""

from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_credit.data.problems import BadRows

Split = Literal["train", "eval"]


@dataclass
class SourceReport:
    """The rows of one source: `read` is the sum of `kept` and of all that were left out."""

    name: str
    split: Split
    read: int = 0
    bad: BadRows = field(default_factory=BadRows)
    """Malformed rows."""
    too_long: int = 0
    """Rows whose prompt has more tokens than data.max_prompt_tokens."""
    held_out: int = 0
    """Training rows that became held-out prompts, by data.eval_size."""
    overlap: int = 0
    """Training rows left out because their question is also a held-out one."""
    repeated: int = 0
    """Held-out rows left out because an earlier row has the same question."""
    repeated_kept: int = 0
    """Training rows with the question of an earlier row."""
    kept: int = 0
    longest: int = 0
    """Tokens of the longest prompt that was kept."""

    @property
    def left_out(self) -> dict[str, int]:
        """Number of rows that were left out, by why; malformed ones by what is wrong with them."""
        counts = {
            **self.bad.counts,
            "too long": self.too_long,
            "held out": self.held_out,
            "also held out": self.overlap,
            "repeated": self.repeated,
        }
        return {why: count for why, count in counts.items() if count}

    def __str__(self) -> str:
        notes = [f"left out {count:,}: {why}" for why, count in self.left_out.items()]
        if self.repeated_kept:
            notes.append(f"{self.repeated_kept:,} of them repeat a question")
        return "; ".join([f"{self.split} {self.name}: {self.kept:,} of {self.read:,} rows", *notes])


@dataclass(frozen=True)
class DataReport:
    """The reports of all sources, training first."""

    sources: tuple[SourceReport, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.sources))

    def as_json(self) -> dict[str, Any]:
        """The numbers, and the first malformed rows in words, as JSON can hold them."""
        return {
            f"{source.split}/{source.name}": {
                "read": source.read,
                "kept": source.kept,
                "left_out": source.left_out,
                "repeated_kept": source.repeated_kept,
                "longest_prompt_tokens": source.longest,
                "malformed": list(map(str, source.bad.first)),
            }
            for source in self.sources
        }
