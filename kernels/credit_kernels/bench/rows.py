"""Lines of the result: one for each method on each problem."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from credit_kernels.bench.clock import quantiles
from credit_kernels.bench.machine import Ceilings
from credit_kernels.bench.problem import Problem
from credit_kernels.bench.roofline import work_of


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What was measured; where it is trained, total is forward and backward."""

    forward_p20_s: float
    forward_p50_s: float
    forward_p80_s: float
    total_p20_s: float
    total_p50_s: float
    total_p80_s: float
    time_ratio: float
    """To eager torch's total in the same run; NaN where that did not fit."""
    extra_mb: float
    """10^6 bytes besides inputs and gradients."""
    memory_ratio: float
    """To eager torch's."""
    tflop_per_s: float
    """Compulsory operations by the total."""
    gemm_percent: float
    """Of the measured speed of a large product."""
    gb_per_s: float
    """Compulsory bytes by the total."""
    bandwidth_percent: float
    """Of the measured bandwidth."""
    attainable_s: float
    roofline_percent: float
    """attainable_s by the total."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method on one problem."""

    operation: str
    head: str
    ranks: int
    tokens: int
    hidden: int
    vocabulary: int
    dtype: str
    method: str
    note: str = ""
    """Why there are no figures."""
    figures: Figures | None = None

    @classmethod
    def of(
        cls, problem: Problem, method: str, *, note: str = "", figures: Figures | None = None
    ) -> "Row":
        """The problem spelled out."""
        return cls(
            operation=problem.operation.name,
            head=problem.head.name,
            ranks=problem.head.ranks,
            tokens=problem.tokens,
            hidden=problem.head.hidden,
            vocabulary=problem.head.vocabulary,
            dtype=str(problem.dtype).removeprefix("torch."),
            method=method,
            note=note,
            figures=figures,
        )

    def flat(self) -> dict[str, str | int | float | None]:
        """Every column; figures are None where there are none."""
        columns = {field.name: None for field in fields(Figures)}
        if self.figures is not None:
            columns = asdict(self.figures)
        return {key: value for key, value in vars(self).items() if key != "figures"} | columns

    @property
    def problem(self) -> str:
        """A title for the rows that belong together."""
        ranks = "" if self.ranks == 1 else f", one of {self.ranks} ranks"
        return (
            f"{self.operation}, {self.head}{ranks}: T {self.tokens}, H {self.hidden}, "
            f"V {self.vocabulary}, {self.dtype}"
        )


def figures_of(
    problem: Problem,
    ceilings: Ceilings,
    passes: Sequence[tuple[float, float]],
    extra: float,
    eager: tuple[float, float],
) -> Figures:
    """From seconds of each pass, extra bytes, and eager torch's median seconds and bytes."""
    forward, total = (quantiles(list(column)) for column in zip(*passes, strict=True))
    work = work_of(problem)
    flop_per_s, bytes_per_s = work.flops / total[1], work.bytes / total[1]
    attainable = work.attainable_s(ceilings)
    return Figures(
        forward_p20_s=forward[0],
        forward_p50_s=forward[1],
        forward_p80_s=forward[2],
        total_p20_s=total[0],
        total_p50_s=total[1],
        total_p80_s=total[2],
        time_ratio=total[1] / eager[0],
        extra_mb=extra / 1e6,
        memory_ratio=extra / eager[1],
        tflop_per_s=flop_per_s / 1e12,
        gemm_percent=100 * flop_per_s / ceilings.flop_per_s,
        gb_per_s=bytes_per_s / 1e9,
        bandwidth_percent=100 * bytes_per_s / ceilings.bytes_per_s,
        attainable_s=attainable,
        roofline_percent=100 * attainable / total[1],
    )
