"""The result as JSON, CSV, Markdown and pictures."""

import csv
import json
import math
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from credit_kernels.bench.machine import Ceilings
from credit_kernels.bench.pictures import draw_roofline, draw_speed
from credit_kernels.bench.rows import Figures, Row

MEANINGS = {
    "time": "CPU seconds of one thread, or seconds of a GPU's own events; total is forward and, "
    "where gradients are wanted, backward; the methods take turns",
    "ratio": "to eager torch in the same run",
    "memory": "most memory besides inputs and gradients, MB of 10^6 bytes: resident size of a "
    "fresh process on a CPU, torch's allocations on a GPU",
    "work": "compulsory products (2 T H V a context, and one for each gradient) and bytes (inputs "
    "in each pass, gradients); what a method computes again does not count as achieved",
    "roofline": "time in which the machine's measured product speed and bandwidth allow the "
    "compulsory work, by the time taken",
}
BUSY_LOAD = 1.5
"""A load average that the benchmark's one thread does not explain."""
COLUMNS = (
    "| method | p20 | p50 | p80 | ratio | extra memory | ratio | TFLOP/s | of product | GB/s "
    "| of bandwidth | of roofline |"
)


def write_report(
    output: Path, state: dict, ceilings: Ceilings, rows: list[Row], *, repeats: int
) -> list[Path]:
    """The files: kernels.json, .csv, .md, speed.png, roofline.png."""
    paths = [output / name for name in ("kernels.json", "kernels.csv", "kernels.md")]
    data, table, text = paths
    flat = [row.flat() for row in rows]
    content = {
        "machine": state,
        "ceilings": asdict(ceilings),
        "repeats": repeats,
        "meanings": MEANINGS,
        "rows": [_without_nan(row) for row in flat],
    }
    data.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, flat[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)
    text.write_text(markdown(state, ceilings, rows, repeats=repeats))
    title = f"{state['device']} ({state['device_type'].upper()} figures), {state['date']}"
    draw_speed(rows, output / "speed.png", title=title)
    draw_roofline(rows, ceilings, output / "roofline.png", title=title)
    return [*paths, output / "speed.png", output / "roofline.png"]


def markdown(state: dict, ceilings: Ceilings, rows: list[Row], *, repeats: int) -> str:
    """Everything that a reader needs, machine and date included."""
    kind = state["device_type"].upper()
    clock = "CPU time of one thread" if kind == "CPU" else "time by the GPU's events"
    load = str(state["load_average"])
    if kind == "CPU" and state["load_average"] >= BUSY_LOAD:
        load += " (other jobs ran too)"
    lines = [
        f"# Kernels on {state['device']}: {kind} figures",
        "",
        f"{state['date']}, torch {state['torch']}, threads {state['threads']}, load average up to "
        f"{load}; {clock}, forward and backward, {repeats} passes. A product reaches "
        f"{ceilings.flop_per_s / 1e12:.3g} TFLOP/s here, a copy "
        f"{ceilings.bytes_per_s / 1e9:.3g} GB/s. Values and gradients were checked first.",
    ]
    for problem, group in groupby(rows, lambda row: row.problem):
        lines += ["", f"## {problem}", "", COLUMNS, "|---" + "|---:" * 11 + "|"]
        members = list(group)
        lines += [_line(row.method, row.figures) for row in members if row.figures is not None]
        lines += ["", *(f"- {row.method}: {row.note}" for row in members if row.note)]
    notes = "".join(f"- {key}: {meaning}\n" for key, meaning in MEANINGS.items())
    return "\n".join(lines) + f"\n\n## Meanings\n\n{notes}"


def _line(method: str, found: Figures) -> str:
    seconds = (found.total_p20_s, found.total_p50_s, found.total_p80_s)
    cells = [
        method,
        *(f"{1e3 * value:.4g} ms" for value in seconds),
        f"{found.time_ratio:.2f}",
        f"{found.extra_mb:.0f} MB",
        f"{found.memory_ratio:.2f}",
        f"{found.tflop_per_s:.3g}",
        f"{found.gemm_percent:.0f} %",
        f"{found.gb_per_s:.3g}",
        f"{found.bandwidth_percent:.1f} %",
        f"{found.roofline_percent:.0f} %",
    ]
    return f"| {' | '.join(cells)} |"


def _without_nan(row: dict) -> dict:
    """JSON has no NaN."""
    return {
        key: None if isinstance(value, float) and math.isnan(value) else value
        for key, value in row.items()
    }
