"""The share of each method's credit on the first wrong step, as bars."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from megatron_credit.trainer.localisation.measure import Estimate

HEIGHT = 0.38


@dataclass(frozen=True)
class Bar:
    """A method."""

    label: str
    credit: Estimate
    signal: Estimate | None
    uniform: float
    """The culprit's share of the tokens."""


def draw_bars(bars: Sequence[Bar], path: Path) -> None:
    """Writes a PNG: two bars with 95 % intervals a method, and where credit that is the same for
    all tokens would stand."""
    figure, axes = plt.subplots(figsize=(8, 1.4 + 0.42 * len(bars)), layout="constrained")
    for kind, colour, shift in (("credit", "C0", -HEIGHT / 2), ("signal", "C1", HEIGHT / 2)):
        shown = [
            (place + shift, found)
            for place, bar in enumerate(bars)
            if (found := vars(bar)[kind]) is not None and not math.isnan(found.mean)
        ]
        axes.barh(
            [place for place, _ in shown],
            [found.mean for _, found in shown],
            HEIGHT,
            xerr=[
                [found.mean - found.low for _, found in shown],
                [found.high - found.mean for _, found in shown],
            ],
            color=colour,
            error_kw={"lw": 1},
            label=kind,
        )
    places = range(len(bars))
    axes.vlines(
        [bar.uniform for bar in bars],
        [place - HEIGHT for place in places],
        [place + HEIGHT for place in places],
        color="black",
        lw=1,
        ls="--",
        label="uniform",
    )
    axes.set_yticks(places, [bar.label for bar in bars])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("share on the first wrong step")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    plt.close(figure)
