"""Tables and picture of a comparison."""

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

from megatron_credit.trainer.contest.figures import (
    PHASES,
    Line,
    Record,
    Times,
    curve,
    step_means,
    step_times,
)

OVER_STEPS = ("reward/mean", "group/equal_rewards", "credit/zero_tokens", "evidence/rollouts")
"""What is averaged over the steps in place of a curve."""


def write_report(
    records: Sequence[Record], output: Path, *, metrics: Sequence[str], about: dict[str, str]
) -> list[Path]:
    """Writes methods.json, .csv, .md and, where there were evaluations, .png; their paths."""
    curves = {metric: curve(records, metric) for metric in metrics}
    curves = {metric: lines for metric, lines in curves.items() if lines}
    times, means = step_times(records), step_means(records, OVER_STEPS)
    found = {
        "about": about,
        "curves": {metric: [asdict(line) for line in lines] for metric, lines in curves.items()},
        "over steps": means,
        "times": [asdict(one) for one in times],
    }
    paths = [output / f"methods.{ending}" for ending in ("json", "csv", "md", "png")]
    paths[0].write_text(json.dumps(found, indent=1) + "\n")
    write_csv(paths[1], curves)
    paths[2].write_text(markdown(curves, means, times, about))
    if not curves:
        # Nothing was evaluated: there is nothing to draw.
        return paths[:3]
    draw(paths[3], curves)
    return paths


def write_csv(path: Path, curves: dict[str, list[Line]]) -> None:
    """A row for each metric, configuration and step."""
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        parts = ("mean", "low", "high")
        bounds = [f"{kind}_{part}" for kind in ("value", "gain") for part in parts]
        table.writerow(["metric", "name", "step", *bounds])
        for metric, lines in curves.items():
            for line in lines:
                gain = ["", "", ""] if line.gain is None else asdict(line.gain).values()
                table.writerow([metric, line.name, line.step, *asdict(line.value).values(), *gain])


def markdown(
    curves: dict[str, list[Line]],
    means: dict[str, dict[str, float]],
    times: Sequence[Times],
    about: dict[str, str],
) -> str:
    """The tables for people."""
    parts = ["\n".join(f"- {name}: {value}" for name, value in about.items())]
    for metric, lines in curves.items():
        steps = sorted({line.step for line in lines})
        names = list(dict.fromkeys(line.name for line in lines))
        by_place = {(line.name, line.step): line for line in lines}
        rows = [
            f"| {name} | " + " | ".join(cell(by_place.get((name, step))) for step in steps) + " |"
            for name in names
        ]
        head = f"| {metric} | " + " | ".join(f"step {step}" for step in steps) + " |"
        parts.append("\n".join([head, "|---" * (len(steps) + 1) + "|", *rows]))
    head = "| mean over all steps | " + " | ".join(OVER_STEPS) + " |"
    rows = [
        f"| {name} | "
        + " | ".join(f"{own[one]:.3f}" if one in own else "" for one in OVER_STEPS)
        + " |"
        for name, own in means.items()
    ]
    parts.append("\n".join([head, "|---" * (len(OVER_STEPS) + 1) + "|", *rows]))
    head = "| seconds of a step | all | " + " | ".join(PHASES) + " | over the baseline |"
    rows = [
        f"| {one.name} | {one.step_s:.2f} | "
        + " | ".join(f"{one.phases[phase]:.2f}" for phase in PHASES)
        + f" | {one.ratio - 1:+.0%} |"
        for one in times
    ]
    parts.append("\n".join([head, "|---" * (len(PHASES) + 3) + "|", *rows]))
    return "\n\n".join(parts) + "\n"


def cell(line: Line | None) -> str:
    """The value with its interval, and the gain over the baseline with its own."""
    if line is None:
        return ""
    gain = ""
    if line.gain is not None:
        one = line.gain
        gain = f"; {one.mean:+.3f} [{one.low:+.3f}, {one.high:+.3f}]"
    return f"{line.value}{gain}"


def draw(path: Path, curves: dict[str, list[Line]]) -> None:
    """One panel a metric: means with their intervals."""
    figure, axes = pyplot.subplots(
        1, len(curves), figsize=(6 * len(curves), 4), squeeze=False, layout="constrained"
    )
    for panel, (metric, lines) in zip(axes[0], curves.items(), strict=True):
        for name in dict.fromkeys(line.name for line in lines):
            own = [line for line in lines if line.name == name]
            steps = [line.step for line in own]
            (drawn,) = panel.plot(steps, [line.value.mean for line in own], label=name)
            panel.fill_between(
                steps,
                [line.value.low for line in own],
                [line.value.high for line in own],
                color=drawn.get_color(),
                alpha=0.15,
                linewidth=0,
            )
        panel.set_xticks(sorted({line.step for line in lines}))
        panel.set_xlabel("step")
        panel.set_ylabel(metric)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
