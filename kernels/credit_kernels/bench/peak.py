"""Started as a process of its own, which prints how many bytes one method takes on the CPU.

Its one argument is a JSON object with the keys of `measure`.
"""

import json
import sys
from pathlib import Path

import torch

from credit_kernels.bench.clock import gradient_bytes
from credit_kernels.bench.methods import methods_of
from credit_kernels.bench.operations import OPERATIONS
from credit_kernels.bench.problem import Problem, evaluate
from credit_kernels.bench.shapes import Head

PASSES = 2


def measure(
    *, operation: str, method: str, hidden: int, vocabulary: int, tokens: int, dtype: str
) -> int:
    """Growth of the peak resident size over some passes, less the gradients."""
    torch.set_num_threads(1)
    chosen = next(known for known in OPERATIONS if known.name == operation)
    problem = Problem(
        operation=chosen,
        head=Head(name="", hidden=hidden, vocabulary=vocabulary),
        tokens=tokens,
        dtype=getattr(torch, dtype),
        device=torch.device("cpu"),
    )
    compute = next(known.compute for known in methods_of(chosen) if known.name == method)
    # What libraries load at their first call, and a compiler does, is no memory of the method.
    evaluate(compute, problem.draw() if method == "torch.compile" else problem.draw(8))
    inputs = problem.draw()
    # 5 resets the high-water mark (proc(5), clear_refs).
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmRSS")
    for _ in range(PASSES):
        evaluate(compute, inputs)
    return status_bytes("VmHWM") - before - gradient_bytes(inputs)


def status_bytes(key: str) -> int:
    """A size in /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


if __name__ == "__main__":
    sys.stdout.write(f"{measure(**json.loads(sys.argv[1]))}\n")
