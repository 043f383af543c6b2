"""Pictures of the result."""

from pathlib import Path

from credit_kernels.bench.machine import Ceilings
from credit_kernels.bench.rows import Figures, Row


def draw_speed(rows: list[Row], path: Path, *, title: str) -> None:
    """A PNG: for each problem the times, with their spread and the roofline, and the memory."""
    from matplotlib.figure import Figure

    problems = list(dict.fromkeys(row.problem for row in rows))
    figure = Figure(figsize=(12, 1 + 2.4 * len(problems)), layout="constrained")
    axes = figure.subplots(len(problems), 2, squeeze=False)
    for (left, right), problem in zip(axes, problems, strict=True):
        shown = [
            (row.method, row.figures)
            for row in rows
            if row.problem == problem and row.figures is not None
        ][::-1]
        names = [name for name, _ in shown]
        colours = ["C0" if name.startswith("ours") else "0.6" for name in names]
        found = [figures for _, figures in shown]
        left.barh(
            names, [one.total_p50_s * 1e3 for one in found], color=colours, xerr=_spread(found)
        )
        left.axvline(found[0].attainable_s * 1e3, color="C3", ls="--", label="roofline")
        left.set_title(problem, fontsize=9, loc="left")
        left.set_xlabel("ms, p50 with p20 and p80")
        left.legend(fontsize=8)
        bars = right.barh(names, [max(one.extra_mb, 1.0) for one in found], color=colours)
        right.bar_label(bars, fmt="{:.0f}", padding=2, fontsize=8)
        right.set_xscale("log")
        right.set_xlim(1, 3 * max(1.0, *(one.extra_mb for one in found)))
        right.set_xlabel("extra memory, MB")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def _spread(found: list[Figures]) -> list[list[float]]:
    return [
        [(one.total_p50_s - one.total_p20_s) * 1e3 for one in found],
        [(one.total_p80_s - one.total_p50_s) * 1e3 for one in found],
    ]


def draw_roofline(rows: list[Row], ceilings: Ceilings, path: Path, *, title: str) -> None:
    """A PNG: achieved speed of each method over the operations for each compulsory byte."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    points = [(row.method, row.figures) for row in rows if row.figures is not None]
    intensities = [_intensity(figures) for _, figures in points]
    ridge = ceilings.flop_per_s / ceilings.bytes_per_s
    line = [ridge / 30, ridge, max(*intensities, ridge) * 3]
    roof = [min(ceilings.flop_per_s, x * ceilings.bytes_per_s) / 1e12 for x in line]
    axes.loglog(line, roof, color="black", label="measured ceilings")
    for method in dict.fromkeys(name for name, _ in points):
        mine = [figures for name, figures in points if name == method]
        axes.loglog(
            [_intensity(one) for one in mine],
            [one.tflop_per_s for one in mine],
            "o" if method.startswith("ours") else "x",
            label=method,
        )
    axes.set_xlabel("compulsory operations for each compulsory byte")
    axes.set_ylabel("compulsory TFLOP/s")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    axes.set_title(title)
    figure.savefig(path, dpi=110)


def _intensity(figures: Figures) -> float:
    return figures.tflop_per_s * 1e3 / figures.gb_per_s
