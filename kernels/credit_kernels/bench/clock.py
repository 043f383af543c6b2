"""Seconds and bytes of a method: CPU time and peak resident size, or a GPU's own counters."""

import json
import shlex
import statistics
import subprocess
import sys
import time

import torch

from credit_kernels.bench.errors import BenchmarkFailed
from credit_kernels.bench.methods import Method
from credit_kernels.bench.problem import Inputs, Problem, evaluate, gradients

CACHE_BYTES = 2**28
"""Overwritten before each pass on a GPU, so that no pass finds its inputs in the cache."""

Stamp = float | torch.cuda.Event


def stamp(device: torch.device) -> Stamp:
    """CPU seconds of this process, or an event in the GPU's queue."""
    if device.type == "cpu":
        return time.process_time()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed(start: Stamp, end: Stamp) -> float:
    """Seconds between two stamps."""
    if isinstance(start, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    assert isinstance(end, float)
    return end - start


def time_pass(method: Method, inputs: Inputs) -> tuple[float, float]:
    """Seconds of the forward pass, and of both."""
    device = inputs[2].device
    if device.type == "cuda":
        torch.empty(CACHE_BYTES, dtype=torch.uint8, device=device).zero_()
    start = stamp(device)
    outputs = method.compute(*inputs)
    middle = stamp(device)
    gradients(outputs, inputs)
    end = stamp(device)
    return elapsed(start, middle), elapsed(start, end)


def time_methods(
    problem: Problem, methods: list[Method], repeats: int
) -> dict[str, list[tuple[float, float]]]:
    """Seconds of each pass by method; those that ran out of memory are left out.

    The methods take turns, so that they share what else the machine does. The first round is not
    counted.
    """
    inputs = problem.draw()
    samples: dict[str, list[tuple[float, float]]] = {method.name: [] for method in methods}
    for _ in range(repeats + 1):
        for method in methods:
            if method.name not in samples:
                continue
            try:
                samples[method.name].append(time_pass(method, inputs))
            except torch.OutOfMemoryError:
                del samples[method.name]
                torch.cuda.empty_cache()
    return {name: taken[1:] for name, taken in samples.items()}


def quantiles(values: list[float]) -> tuple[float, float, float]:
    """The 20th, 50th and 80th percentile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    fifths = statistics.quantiles(values, n=10, method="inclusive")
    return fifths[1], fifths[4], fifths[7]


def extra_bytes(problem: Problem, method: Method) -> float:
    """Most memory during the passes, less inputs and gradients, which every method must hold."""
    if problem.device.type == "cpu":
        return _in_fresh_process(problem, method)
    inputs = problem.draw()
    evaluate(method.compute, inputs)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(problem.device)
    torch.cuda.reset_peak_memory_stats(problem.device)
    evaluate(method.compute, inputs)
    peak = torch.cuda.max_memory_allocated(problem.device)
    return peak - before - gradient_bytes(inputs)


def gradient_bytes(inputs: Inputs) -> int:
    """What the gradients of the inputs take."""
    return sum(value.numel() * value.element_size() for value in inputs if value.requires_grad)


def _in_fresh_process(problem: Problem, method: Method) -> float:
    task = {
        "operation": problem.operation.name,
        "method": method.name,
        "hidden": problem.head.hidden,
        "vocabulary": problem.head.vocabulary,
        "tokens": problem.tokens,
        "dtype": str(problem.dtype).removeprefix("torch."),
    }
    command = [sys.executable, "-m", "credit_kernels.bench.peak", json.dumps(task)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BenchmarkFailed(
            f"{shlex.join(command)} ended with {done.returncode} (-9: the memory did not suffice)\n"
            f"{done.stderr}"
        )
    return float(done.stdout.splitlines()[-1])
