"""What a run directory holds, as far as the page shows it."""

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_credit.batch.rollout import Rollout
from megatron_credit.batch.rollout_files import read_rollouts

ROLLOUT_FILE = re.compile(r"step-\d+\.(jsonl|parquet)")
MAX_RECORD_BYTES = 400 * 2**20
"""A page holds the rollouts of about this many bytes of JSON; it is then near 30 MB."""
JSON_PER_PARQUET = 2.5
"""Bytes of a number in JSON for each in Parquet, which deflates random numbers as little."""


@dataclass(frozen=True, kw_only=True)
class RolloutGroup:
    """The rollouts of one prompt at one step, all of them."""

    step: int
    rollouts: list[Rollout]


@dataclass(frozen=True, kw_only=True)
class RolloutFile:
    """The rollouts of a step on disk."""

    step: int
    path: Path
    num_bytes: int
    num_rollouts: int


def read_config(run: Path) -> dict[str, Any]:
    """The resolved configuration; empty where the run has none."""
    path = run / "config.json"
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error}); restore it or delete it") from None


def read_metrics(run: Path) -> tuple[list[dict[str, float]], bool]:
    """The records of metrics.jsonl, and whether its last line was cut off and is left out."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        return [], False
    lines = path.read_text().splitlines(keepends=True)
    cut_off = bool(lines) and not lines[-1].endswith("\n")
    return [metrics_record(path, row, line) for row, line in whole(lines, cut_off)], cut_off


def whole(lines: list[str], cut_off: bool) -> list[tuple[int, str]]:
    """Number (from 1) and text of the lines that are complete and not blank."""
    kept = lines[:-1] if cut_off else lines
    return [(row, line) for row, line in enumerate(kept, 1) if line.strip()]


def metrics_record(path: Path, row: int, line: str) -> dict[str, float]:
    """The parsed line; ValueError where it is no record of a step."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} line {row} is not JSON ({error}); delete the line") from None
    if not isinstance(record, dict) or "step" not in record:
        raise ValueError(f"{path} line {row} has no step; expected one JSON object a step")
    return record


def rollout_files(run: Path) -> list[RolloutFile]:
    """The rollout files in the order of their steps; nothing is parsed."""
    folder = run / "rollouts"
    paths = folder.iterdir() if folder.is_dir() else ()
    files = [measured(path) for path in paths if ROLLOUT_FILE.fullmatch(path.name)]
    return sorted(files, key=lambda file: file.step)


def measured(path: Path) -> RolloutFile:
    """The file with its number of rollouts and how many bytes of JSON they are."""
    step, size = int(path.stem.removeprefix("step-")), path.stat().st_size
    if path.suffix == ".parquet":
        # Only runs that wrote Parquet need pyarrow.
        from pyarrow.parquet import read_metadata

        num_rollouts = read_metadata(path).num_rows
        size = int(size * JSON_PER_PARQUET)
    else:
        with path.open("rb") as lines:
            num_rollouts = sum(1 for _ in lines)
    return RolloutFile(step=step, path=path, num_bytes=size, num_rollouts=num_rollouts)


def share_to_show(files: list[RolloutFile], *, max_rollouts: int) -> float:
    """The share of the rollouts that fits on a page: 1 for all."""
    rollouts = sum(file.num_rollouts for file in files)
    size = sum(file.num_bytes for file in files)
    return min(1.0, max_rollouts / max(rollouts, 1), MAX_RECORD_BYTES / max(size, 1))


def read_groups(files: list[RolloutFile], *, share: float) -> Iterator[RolloutGroup]:
    """Whole groups, spread evenly over the steps, until there are `share` of all rollouts."""
    shown = passed = 0
    for file in files:
        passed += file.num_rollouts
        for group in groups_of_file(file):
            if shown >= share * passed:
                break
            shown += len(group.rollouts)
            yield group


def groups_of_file(file: RolloutFile) -> Iterator[RolloutGroup]:
    """The groups of a step, one after the other."""
    for _, group in itertools.groupby(read_rollouts(file.path), key=same_prompt):
        yield RolloutGroup(step=file.step, rollouts=list(group))


def same_prompt(rollout: Rollout) -> tuple[str, list[int]]:
    """What the rollouts of a group have in common."""
    return rollout.prompt_id, rollout.prompt_ids
