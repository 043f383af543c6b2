"""The learning curve of a run as a picture."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

Records = list[dict[str, float]]


def draw_curve(records: Records, path: Path, *, title: str) -> None:
    """Writes a PNG: held-out accuracy and training reward above, log-prob mismatch and time below.

    Raises ValueError when there are no records.
    """
    if not records:
        raise ValueError("no metrics to draw; the run recorded no step")
    figure, (top, middle, bottom) = plt.subplots(
        3, 1, figsize=(8, 9), sharex=True, height_ratios=(3, 1, 1.2), layout="constrained"
    )
    draw_accuracy(top, records)
    draw_mismatch(middle, records)
    draw_times(bottom, records)
    top.set_title(title)
    bottom.set_xlabel("step")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def series(records: Records, name: str) -> tuple[list[float], list[float]]:
    """Steps and values of the records that have the metric."""
    points = [(record["step"], record[name]) for record in records if name in record]
    return [step for step, _ in points], [value for _, value in points]


def draw_accuracy(axes: Axes, records: Records) -> None:
    """Reward of the training rollouts and accuracy on held-out prompts."""
    axes.plot(*series(records, "reward/mean"), color="0.6", lw=1, label="training reward")
    axes.plot(*series(records, "eval/accuracy"), "o-", color="C0", label="held-out, T=1")
    axes.plot(*series(records, "eval/accuracy_greedy"), "s--", color="C1", label="held-out, greedy")
    axes.set_ylim(0, 1)
    axes.set_ylabel("share correct")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")


def draw_mismatch(axes: Axes, records: Records) -> None:
    """Largest |engine log-prob - trainer log-prob| of each step."""
    axes.semilogy(*series(records, "mismatch/logprob_abs_max"), color="C3", lw=1)
    axes.set_ylabel("max log-prob\nmismatch (nat)")
    axes.grid(alpha=0.3)


def draw_times(axes: Axes, records: Records) -> None:
    """Seconds of each phase, stacked."""
    phases = ("rollout", "train", "sync")
    rows = [record for record in records if "timing/step_s" in record]
    steps = [row["step"] for row in rows]
    heights = [[row[f"timing/{phase}_s"] for row in rows] for phase in phases]
    axes.stackplot(steps, heights, labels=phases, alpha=0.8)
    axes.set_ylabel("seconds a step")
    axes.legend(loc="upper right", ncols=3)
