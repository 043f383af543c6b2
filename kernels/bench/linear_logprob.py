"""Time and memory of linear_logprob, forward and backward, against naive torch on one CPU thread.

    OMP_NUM_THREADS=1 python kernels/bench/linear_logprob.py [--repeats 5] [--out FILE]

Values and gradients are compared with float64 before anything is timed. Every measurement runs in a
process of its own, alternating with the baseline: CPU time (other load on the machine counts less)
as a median, memory as the peak of the resident set above what was there before the call, with the
gradients that any implementation must return (of hidden and weight) taken off.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from credit_kernels import linear_logprob
from credit_kernels.logprob.reference import linear_logprob_reference
from torch import Tensor

TOKENS, HIDDEN, VOCABULARY = 2048, 256, 32000
ENTROPY_WEIGHT = 0.1

Function = Callable[[Tensor, Tensor, Tensor], Tensor]


def naive(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> Tensor:
    """Log-probs by log_softmax over all logits."""
    logprob_TV = torch.log_softmax(hidden_TH @ weight_VH.T, -1)
    return logprob_TV.gather(-1, target_T[:, None]).sum()


def naive_entropy(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> Tensor:
    """Log-probs and entropies by log_softmax over all logits."""
    logprob_TV = torch.log_softmax(hidden_TH @ weight_VH.T, -1)
    entropy_T = -(logprob_TV.exp() * logprob_TV).sum(-1)
    return logprob_TV.gather(-1, target_T[:, None]).sum() + ENTROPY_WEIGHT * entropy_T.sum()


def ours(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> Tensor:
    """The same as `naive`."""
    return linear_logprob(hidden_TH, weight_VH, target_T).sum()


def ours_entropy(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> Tensor:
    """The same as `naive_entropy`."""
    logprob_T, entropy_T = linear_logprob(hidden_TH, weight_VH, target_T, return_entropy=True)
    return logprob_T.sum() + ENTROPY_WEIGHT * entropy_T.sum()


VARIANTS: dict[str, Function] = {
    "naive": naive,
    "ours": ours,
    "naive_entropy": naive_entropy,
    "ours_entropy": ours_entropy,
}


def inputs(tokens: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """hidden_TH and weight_VH with gradients, target_T."""
    generator = torch.Generator().manual_seed(0)
    hidden_TH = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    weight_VH = (0.05 * torch.randn(vocabulary, HIDDEN, generator=generator)).to(dtype)
    target_T = torch.randint(vocabulary, (tokens,), generator=generator)
    return hidden_TH.requires_grad_(), weight_VH.requires_grad_(), target_T


def check() -> float:
    """The largest error of values and gradients against float64, at a size that fits."""
    mine, truth = inputs(256, VOCABULARY), inputs(256, VOCABULARY, torch.float64)
    ours_entropy(*mine).backward()
    logprob_T, entropy_T = linear_logprob_reference(*truth, total=VOCABULARY)
    (logprob_T.sum() + ENTROPY_WEIGHT * entropy_T.sum()).backward()
    errors = [(mine[k].grad.double() - truth[k].grad).abs().max().item() for k in (0, 1)]
    values = linear_logprob(*mine, return_entropy=True)
    for value, true in zip(values, (logprob_T, entropy_T), strict=True):
        errors.append((value.double() - true).abs().max().item())
    if max(errors) > 1e-4:
        raise RuntimeError(f"wrong results, errors {errors}; nothing was timed")
    return max(errors)


def measure(variant: str) -> dict[str, float]:
    """CPU seconds and extra MB of one forward and backward pass; for a process of its own."""
    torch.set_num_threads(1)
    function = VARIANTS[variant]
    function(*inputs(8, 64)).backward()  # libraries are loaded
    arguments = inputs(TOKENS, VOCABULARY)
    before = restart_peak()
    start = time.process_time()
    function(*arguments).backward()
    seconds = time.process_time() - start
    returned = sum(argument.grad.nbytes for argument in arguments[:2])
    return {"cpu_s": seconds, "extra_mb": (status_bytes("VmHWM") - before - returned) / 1e6}


def restart_peak() -> int:
    """Bytes that are resident now; the kernel's record of the peak starts again from there."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def status_bytes(name: str) -> int:
    """A size from this process's status (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Runs all variants in turn, prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--one", choices=VARIANTS)
    default = Path(__file__).parent / "results" / "linear_logprob_cpu.json"
    parser.add_argument("--out", type=Path, default=default)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one)))
        return
    error = check()
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    for _ in range(arguments.repeats):
        for name, found in runs.items():
            command = [sys.executable, __file__, "--one", name]
            found.append(json.loads(subprocess.check_output(command, text=True)))
    report(runs, error, arguments.out)


def report(runs: dict[str, list[dict[str, float]]], error: float, out: Path) -> None:
    """Prints medians and ratios and writes them."""
    result = {
        "date": date.today().isoformat(),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "shape": {"tokens": TOKENS, "hidden": HIDDEN, "vocabulary": VOCABULARY, "dtype": "float32"},
        "largest_error_against_float64": error,
    }
    for name, found in runs.items():
        medians = {key: statistics.median(run[key] for run in found) for key in found[0]}
        result[name] = medians | {"runs": found}
        print(f"{name:14} {medians['cpu_s']:.2f} s CPU, {medians['extra_mb']:.0f} MB extra")
    for kind in ("", "_entropy"):
        ratio = result[f"ours{kind}"]["cpu_s"] / result[f"naive{kind}"]["cpu_s"]
        result[f"time_ratio{kind}"] = ratio
        print(f"ours{kind} / naive{kind}: {ratio:.2f} of the time")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
