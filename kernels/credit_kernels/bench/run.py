"""The benchmark: everything is checked, then everything is timed, then written."""

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from credit_kernels.bench.check import Truth
from credit_kernels.bench.clock import extra_bytes, time_methods
from credit_kernels.bench.errors import BenchmarkFailed
from credit_kernels.bench.machine import Ceilings, load_average, machine_state, measure_ceilings
from credit_kernels.bench.methods import Method, methods_of
from credit_kernels.bench.plan import Plan
from credit_kernels.bench.problem import Problem
from credit_kernels.bench.report import write_report
from credit_kernels.bench.rows import Row, figures_of

Tell = Callable[[str], None]
Checked = tuple[list[Method], dict[str, str]]
"""Methods that can be timed, and by name why the others cannot."""


def run(plan: Plan, output: Path, *, tell: Tell) -> list[Path]:
    """The files that it has written to the directory.

    A method of others that cannot run here or is wrong is listed with the reason. Raises
    BenchmarkFailed for one of ours that is wrong, before anything is timed, and ValueError where
    the directory is a file.
    """
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output} is a file; expected a directory, or a name that is free")
    output.mkdir(parents=True, exist_ok=True)
    if plan.device.type == "cpu":
        # CPU time of one thread can be compared where the machine is shared.
        torch.set_num_threads(1)
    checked = []
    for problem in plan.problems:
        tell(f"checking {Row.of(problem, '').problem}")
        checked.append(check(problem, plan.methods))
    ceilings, state = measure_ceilings(plan.device, plan.dtype), machine_state(plan.device)
    rows, paths, loads = [], [], [load_average()]
    for problem, (able, refused) in zip(plan.problems, checked, strict=True):
        tell(f"timing {Row.of(problem, '').problem}")
        rows += measure(problem, able, plan.repeats, ceilings)
        rows += [Row.of(problem, name, note=note) for name, note in refused.items()]
        loads.append(load_average())
        state["load_average"] = max(loads)
        # Again after every problem: a run that is stopped leaves what it has measured.
        paths = write_report(output, state, ceilings, rows, repeats=plan.repeats)
    return paths


def check(problem: Problem, names: Sequence[str]) -> Checked:
    """By values and gradients; BenchmarkFailed where one of ours has others than it should."""
    truth = Truth.of(problem)
    able, refused = [], {}
    for method in methods_of(problem.operation):
        if method.name not in names:
            continue
        complaint = _complaint(method, truth, problem)
        if complaint is None:
            able.append(method)
        else:
            refused[method.name] = complaint
    return able, refused


def _complaint(method: Method, truth: Truth, problem: Problem) -> str | None:
    reason = method.refusal(problem.device)
    if reason is not None:
        return f"cannot run here: {reason}"
    if method.ours:
        try:
            wrong = truth.complaint(method)
        except ValueError as refusal:
            return f"cannot run here: {refusal}"
        if wrong is not None:
            raise BenchmarkFailed(f"{method.name} of {Row.of(problem, '').problem}: {wrong}")
        return None
    try:
        wrong = truth.complaint(method)
    # What a package of others says where it meets a machine that it was not made for.
    except (ImportError, RuntimeError, ValueError) as error:
        return f"cannot run here: {(str(error) or type(error).__name__).splitlines()[0]}"
    return None if wrong is None else f"not timed: {wrong}"


def measure(problem: Problem, methods: list[Method], repeats: int, ceilings: Ceilings) -> list[Row]:
    """Rows of methods that were found right."""
    passes = time_methods(problem, methods, repeats)
    extra = {
        method.name: extra_bytes(problem, method) for method in methods if method.name in passes
    }
    eager = (math.nan, math.nan)
    if "eager" in passes:
        eager = (statistics.median(total for _, total in passes["eager"]), extra["eager"])
    rows = []
    for name in (method.name for method in methods):
        if name not in passes:
            rows.append(Row.of(problem, name, note="not timed: out of memory"))
            continue
        figures = figures_of(problem, ceilings, passes[name], extra[name], eager)
        rows.append(Row.of(problem, name, figures=figures))
    return rows
