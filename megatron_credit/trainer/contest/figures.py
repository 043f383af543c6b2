"""What the runs of a comparison came to: curves with intervals, differences, step times. Pure.

Shape letters: S seeds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

DRAWS = 10_000
PHASES = ("rollout", "signals", "train", "sync")
WARM_STEPS = 2
"""Steps at the start of a run whose times are not counted: the first calls are slower."""


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Record:
    """The metrics of one run by step."""

    name: str
    seed: int
    steps: dict[int, dict[str, float]]


@dataclass(frozen=True)
class Line:
    """One configuration at one step."""

    name: str
    step: int
    value: Interval
    gain: Interval | None
    """Over the baseline, seed by seed; None for the baseline itself."""


def interval(values: Sequence[float]) -> Interval:
    """Mean over seeds; resampled with one fixed stream, so the same values give the same bounds."""
    drawn = np.random.default_rng(0).choice(np.asarray(values), (DRAWS, len(values)))
    low, high = np.quantile(drawn.mean(axis=1), [0.025, 0.975])
    return Interval(float(np.mean(values)), float(low), float(high))


def curve(records: Sequence[Record], metric: str) -> list[Line]:
    """The metric of each configuration at each step at which all its seeds have it."""
    names = list(dict.fromkeys(record.name for record in records))
    lines = []
    for name in names:
        own = [record for record in records if record.name == name]
        base = {record.seed: record for record in records if record.name == names[0]}
        for step in measured_steps(own, metric):
            values = [record.steps[step][metric] for record in own]
            gain = None
            if name != names[0]:
                gains = [
                    record.steps[step][metric] - base[record.seed].steps[step][metric]
                    for record in own
                    if step in base[record.seed].steps
                ]
                gain = interval(gains)
            lines.append(Line(name, step, interval(values), gain))
    return lines


def measured_steps(records: Sequence[Record], metric: str) -> list[int]:
    """Steps at which every one of these runs has the metric."""
    found = [
        {step for step, metrics in record.steps.items() if metric in metrics} for record in records
    ]
    return sorted(set.intersection(*found))


def step_means(records: Sequence[Record], metrics: Sequence[str]) -> dict[str, dict[str, float]]:
    """By configuration, the mean of each metric over all steps and seeds that have it."""
    found: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(record.name for record in records):
        steps = [
            step for record in records if record.name == name for step in record.steps.values()
        ]
        found[name] = {
            metric: fmean(step[metric] for step in steps if metric in step)
            for metric in metrics
            if any(metric in step for step in steps)
        }
    return found


@dataclass(frozen=True)
class Times:
    """Median seconds of a step and of its phases, and the step's ratio to the baseline's."""

    name: str
    step_s: float
    phases: dict[str, float]
    ratio: float
    """Median over the seeds of (median step of the run) / (that of the baseline's run)."""


def step_times(records: Sequence[Record]) -> list[Times]:
    """Of each configuration; the warm-up steps left out."""
    names = list(dict.fromkeys(record.name for record in records))
    base = {record.seed: median_step(record) for record in records if record.name == names[0]}
    found = []
    for name in names:
        own = [record for record in records if record.name == name]
        timed = [step for record in own for step in timed_steps(record)]
        found.append(
            Times(
                name=name,
                step_s=median(step["timing/step_s"] for step in timed),
                phases={
                    phase: median(step.get(f"timing/{phase}_s", 0.0) for step in timed)
                    for phase in PHASES
                },
                ratio=median(median_step(record) / base[record.seed] for record in own),
            )
        )
    return found


def timed_steps(record: Record) -> list[dict[str, float]]:
    """The metrics of the steps whose times count; of a run without others those at the start."""
    timed = {step: found for step, found in record.steps.items() if "timing/step_s" in found}
    warm = [found for step, found in timed.items() if step > WARM_STEPS]
    return warm or list(timed.values())


def median_step(record: Record) -> float:
    """Seconds of a typical step of the run."""
    return median(step["timing/step_s"] for step in timed_steps(record))
