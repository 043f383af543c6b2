"""The benchmark's files: credit.json, .csv, .md and .png, and the same table for the console."""

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.localisation.measure import Estimate
from megatron_credit.trainer.localisation.picture import Bar, draw_bars
from megatron_credit.trainer.localisation.results import (
    POINTING,
    SIGNED,
    RecordFigures,
    Result,
)
from megatron_credit.trainer.localisation.rows import Refusal

HEADINGS = (
    *("method", "credit mass", "signal mass", "uniform", "rank", "first", "AUC", "signal AUC"),
    *("praise", "rollouts", "with credit"),
)
ALL_WRONG_MARK = "*"
LEGEND = (
    "credit mass: share of |credit| on the first wrong step; signal mass: of what the method "
    "reads; uniform: of the tokens; rank: of the step by mean |credit|, 1 the highest; first: "
    "share of rollouts where it is 1; AUC: |credit| as a detector of the step's tokens; praise: "
    "share of the credit above 0 on it. Brackets: 95 % bootstrap over prompts."
)


@dataclass(frozen=True)
class Report:
    """Everything that was found."""

    weights: str
    settings: RunConfig
    records: list[RecordFigures]
    results: list[Result]
    refused: list[Refusal]


def write_report(output: Path, report: Report, console: Console) -> list[Path]:
    """Writes the files and shows the table."""
    paths = [output / f"credit.{suffix}" for suffix in ("json", "csv", "md", "png")]
    paths[0].write_text(json.dumps(as_json(report), indent=2, allow_nan=False) + "\n")
    write_csv(paths[1], report.results)
    paths[2].write_text(markdown(report))
    bars = [
        Bar(label(one), one.credit["mass"], one.signal.get("mass"), one.credit["uniform"].mean)
        for one in report.results
    ]
    draw_bars(bars, paths[3])
    for line in (*aligned([HEADINGS, *map(cells, report.results)]), *remarks(report)):
        console.print(line, markup=False)
    return paths


def label(result: Result) -> str:
    """The row's name, marked where it looks at other groups than most."""
    return result.row.label + (ALL_WRONG_MARK if result.row.groups == "all_wrong" else "")


def cells(result: Result) -> list[str]:
    """A line of the table."""
    credit, signal = result.credit, result.signal
    return [
        label(result),
        interval(credit["mass"]),
        interval(signal.get("mass")),
        number(credit["uniform"].mean, 3),
        number(credit["rank"].mean, 2),
        number(credit["first"].mean, 2),
        number(credit["auc"].mean, 3),
        number(signal["auc"].mean, 3) if signal else "-",
        number(credit["praise"].mean, 3),
        str(result.cases),
        str(credit["mass"].count),
    ]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows with columns below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def interval(found: Estimate | None) -> str:
    """Mean and ends; a dash where there is nothing."""
    if found is None or math.isnan(found.mean):
        return "-"
    return f"{found.mean:.3f} [{found.low:.3f}, {found.high:.3f}]"


def number(value: float, digits: int) -> str:
    """So many decimals; a dash for NaN."""
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def remarks(report: Report) -> list[str]:
    """What a reader of the table has to know, a line each."""
    lines = [LEGEND]
    if any(one.row.groups == "all_wrong" for one in report.results):
        lines.append(
            f"{ALL_WRONG_MARK} over groups in which all are wrong: in mixed ones the method reads "
            "no signal, and its credit is the same for all tokens."
        )
    for one in report.records:
        lines.append(
            f"{one.form}: {one.prompts} prompts, {one.rollouts} rollouts, {one.right:.0%} right; "
            f"{one.cases['mixed']} wrong ones in {one.mixed_groups} mixed groups, "
            f"{one.cases['all_wrong']} in groups without a right one"
        )
    return [*lines, *(f"{one.method}: not measured: {one.reason}" for one in report.refused)]


def markdown(report: Report) -> str:
    """The table as Markdown, with its remarks."""
    rows = [HEADINGS, ["---"] * len(HEADINGS), *map(cells, report.results)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    notes = [f"- {line}" for line in remarks(report)]
    title = f"Where the credit falls: weights of `{report.weights}`"
    return "\n".join([title, "", *lines, "", *notes, ""])


def write_csv(path: Path, results: Sequence[Result]) -> None:
    """A line for each row, with both ends of each interval."""
    fields = ["method", "form", "groups", "rollouts"]
    fields += [
        f"{kind}_{measure}_{part}"
        for kind, measures in (("credit", (*POINTING, *SIGNED)), ("signal", POINTING))
        for measure in measures
        for part in vars(next(iter(results)).credit["mass"])
    ]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        writer.writeheader()
        for one in results:
            row = {
                "method": one.row.label,
                "form": one.row.form,
                "groups": one.row.groups,
                "rollouts": one.cases,
            }
            for kind, found in (("credit", one.credit), ("signal", one.signal)):
                for measure, value in found.items():
                    row |= {f"{kind}_{measure}_{part}": known for part, known in parts(value)}
            writer.writerow(row)


def parts(value: Estimate) -> list[tuple[str, float | None]]:
    """The numbers of an estimate by name, None for NaN."""
    return [(name, None if math.isnan(one) else one) for name, one in vars(value).items()]


def as_json(report: Report) -> dict[str, Any]:
    """Everything, with null for NaN."""
    return {
        "weights": report.weights,
        "records": [asdict(one) for one in report.records],
        "settings": report.settings.model_dump(mode="json"),
        "results": [
            {
                "method": one.row.label,
                "options": one.row.config.credit.options,
                "teacher": one.row.config.evidence.model_dump(mode="json"),
                "form": one.row.form,
                "groups": one.row.groups,
                "rollouts": one.cases,
                "credit": {name: dict(parts(value)) for name, value in one.credit.items()},
                "signal": {name: dict(parts(value)) for name, value in one.signal.items()},
            }
            for one in report.results
        ],
        "not_measured": [asdict(one) for one in report.refused],
    }
