"""Time and memory of evidence_stats and evidence_loss on this CPU, beside the naive computation.

    python kernels/bench/evidence.py --out kernels/bench/results/evidence_cpu.json

The naive computation makes all logits of all contexts and leaves the gradients to autograd. Values
and gradients are checked against float64 before anything is timed. Time is CPU time of one thread,
the methods taking turns so that they share what else the machine does. Memory is the peak resident
size of a fresh process over three passes, less what it had before and less the gradients, which
every method must return. Shape letters: C contexts, T tokens, H hidden, V vocabulary.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from credit_kernels import evidence_loss, evidence_stats
from credit_kernels.evidence.cases import fields
from torch import Tensor

TEMPERATURE = 0.7
TOKENS, HIDDEN, VOCABULARY = 2048, 256, 32000
CHECKED_TOKENS = 64
CONTRAST = ("fec", 1, 2, 0)
"""Three contexts; evidence-free is the student."""

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""hidden_CTH, weight_VH, target_T, controller_T."""
Method = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]

OPTIONS = {"contrast": CONTRAST, "temperature": TEMPERATURE}


def logprobs(hidden_CTH: Tensor, weight_VH: Tensor) -> list[Tensor]:
    """[T, V] of each context."""
    return [
        torch.log_softmax(hidden_TH @ weight_VH.T / TEMPERATURE, -1) for hidden_TH in hidden_CTH
    ]


def contrast(
    student_TV: Tensor, positive_TV: Tensor, negative_TV: Tensor, free_TV: Tensor
) -> tuple[Tensor, Tensor]:
    """alpha_T and d of probabilities."""
    task_TV = positive_TV - negative_TV
    nuisance_TV = (positive_TV + negative_TV) / 2 - free_TV
    centred_TV = nuisance_TV - (student_TV * nuisance_TV).sum(-1, keepdim=True)
    weighted_TV = student_TV * centred_TV
    alpha_T = (weighted_TV * task_TV).sum(-1) / ((weighted_TV * centred_TV).sum(-1) + 1e-8)
    return alpha_T, task_TV - alpha_T[:, None] * nuisance_TV


@torch.no_grad()
def naive_stats(
    hidden_CTH: Tensor, weight_VH: Tensor, target_T: Tensor, controller_T: Tensor
) -> tuple[Tensor, ...]:
    log_CTV = logprobs(hidden_CTH, weight_VH)
    prob_CTV = [log_TV.exp() for log_TV in log_CTV]
    index_T1 = target_T[:, None]
    alpha_T, d_TV = contrast(prob_CTV[0], prob_CTV[1], prob_CTV[2], prob_CTV[0])
    mean_T1 = (prob_CTV[0] * d_TV).sum(-1, keepdim=True)
    student_TV, log_TV = prob_CTV[0], log_CTV[0]
    pairs = list(zip(prob_CTV, log_CTV, strict=True))
    return (
        torch.stack([log.gather(-1, index_T1)[:, 0] for log in log_CTV]),
        torch.stack([-(p * log).sum(-1) for p, log in pairs]),
        torch.stack([(p * (log - log_TV)).sum(-1) for p, log in pairs]),
        torch.stack([(student_TV * (log_TV - log)).sum(-1) for log in log_CTV]),
        alpha_T,
        d_TV.gather(-1, index_T1)[:, 0],
        mean_T1[:, 0],
        (student_TV * (d_TV - mean_T1).square()).sum(-1),
    )


def naive_loss(
    hidden_CTH: Tensor, weight_VH: Tensor, target_T: Tensor, controller_T: Tensor
) -> tuple[Tensor, ...]:
    (log_TV,) = logprobs(hidden_CTH[:1], weight_VH)
    with torch.no_grad():
        student_TV = log_TV.exp()
        teachers = [teacher_TV.exp_() for teacher_TV in logprobs(hidden_CTH[1:], weight_VH)]
        _, d_TV = contrast(student_TV, *teachers, student_TV)
        free_TV = log_TV.detach()
    reference_T = (student_TV * (free_TV - log_TV)).sum(-1)
    return reference_T, -controller_T * (d_TV * log_TV).sum(-1)


def our_stats(
    hidden_CTH: Tensor, weight_VH: Tensor, target_T: Tensor, controller_T: Tensor
) -> tuple[Tensor, ...]:
    return fields(evidence_stats(hidden_CTH, weight_VH, target_T, **OPTIONS))


def our_loss(
    hidden_CTH: Tensor, weight_VH: Tensor, target_T: Tensor, controller_T: Tensor
) -> tuple[Tensor, ...]:
    return evidence_loss(hidden_CTH, weight_VH, target_T, controller_T, **OPTIONS)


METHODS: dict[str, Method] = {
    "naive_stats": naive_stats,
    "ours_stats": our_stats,
    "naive_loss": naive_loss,
    "ours_loss": our_loss,
}
BASELINES = {name: f"naive_{name.split('_')[1]}" for name in METHODS}


def draw(num_tokens: int) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    student_TH = torch.randn(num_tokens, HIDDEN, generator=generator)
    hidden_CTH = student_TH + 0.3 * torch.randn(3, num_tokens, HIDDEN, generator=generator)
    weight_VH = torch.randn(VOCABULARY, HIDDEN, generator=generator) * 0.15
    return (
        hidden_CTH.requires_grad_(),
        weight_VH.requires_grad_(),
        torch.randint(VOCABULARY, (num_tokens,), generator=generator),
        torch.rand(num_tokens, generator=generator),
    )


def loss(outputs: tuple[Tensor, ...]) -> Tensor:
    """A mixture with another weight for every token and output."""
    ramp_T = torch.linspace(-1, 1, outputs[0].shape[-1], dtype=outputs[0].dtype)
    return sum((out * (ramp_T + index)).sum() for index, out in enumerate(outputs))


def evaluate(name: str, inputs: Inputs) -> list[Tensor]:
    """Outputs and, of the losses, gradients."""
    outputs = METHODS[name](*inputs)
    if not outputs[0].requires_grad:
        return list(outputs)
    return [*outputs, *torch.autograd.grad(loss(outputs), inputs[:2])]


def check(name: str) -> None:
    """ValueError where a method errs more than twice as much as the naive one."""
    inputs = draw(CHECKED_TOKENS)
    exact = tuple(
        value.detach().double().requires_grad_(value.requires_grad)
        if value.is_floating_point()
        else value
        for value in inputs
    )
    truth = evaluate(BASELINES[name], exact)
    naive, values = evaluate(BASELINES[name], inputs), evaluate(name, inputs)
    for index, (value, theirs, true) in enumerate(zip(values, naive, truth, strict=True)):
        error, allowed = (value - true).abs().max(), 2 * (theirs - true).abs().max() + 1e-5
        if error > allowed:
            raise ValueError(f"{name}: error {error:.2e} of output {index}, allowed {allowed:.2e}")


def seconds(name: str, inputs: Inputs) -> tuple[float, float]:
    """CPU seconds of the forward pass, and of all."""
    start = time.process_time()
    outputs = METHODS[name](*inputs)
    middle = time.process_time()
    if outputs[0].requires_grad:
        torch.autograd.grad(loss(outputs), inputs[:2])
    return middle - start, time.process_time() - start


def status_kib(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def extra_mb(name: str) -> float:
    """Peak resident MB (10^6 bytes) of this process over three passes, less what must be there."""
    evaluate(name, tuple(value.detach().requires_grad_(value.requires_grad) for value in draw(2)))
    inputs = draw(TOKENS)
    # 5 resets the high-water mark (proc(5), clear_refs).
    Path("/proc/self/clear_refs").write_text("5")
    before = status_kib("VmRSS")
    for _ in range(3):
        evaluate(name, inputs)
    gradients = 0
    if name.endswith("loss"):
        gradients = sum(value.numel() * value.element_size() for value in inputs[:2])
    return ((status_kib("VmHWM") - before) * 1024 - gradients) / 1e6


def measure(repeats: int) -> dict[str, dict[str, float]]:
    inputs = draw(TOKENS)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in METHODS}
    for _ in range(repeats + 1):
        for name in METHODS:
            samples[name].append(seconds(name, inputs))
    rows = {}
    for name, taken in samples.items():
        forward, total = (statistics.median(column) for column in zip(*taken[1:], strict=True))
        command = [sys.executable, __file__, "--memory", name]
        memory = float(subprocess.run(command, check=True, capture_output=True).stdout)
        rows[name] = {"forward_s": forward, "total_s": total, "extra_mb": memory}
    for name, row in rows.items():
        for ratio, quantity in (("time_ratio", "total_s"), ("memory_ratio", "extra_mb")):
            row[ratio] = row[quantity] / rows[BASELINES[name]][quantity]
    return rows


def report(repeats: int) -> dict:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": model,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "load_average": os.getloadavg()[0],
        "threads": torch.get_num_threads(),
        "dtype": "float32",
        "contexts": 3,
        "contrast": CONTRAST,
        "tokens": TOKENS,
        "hidden": HIDDEN,
        "vocabulary": VOCABULARY,
        "temperature": TEMPERATURE,
        "repeats": repeats,
        "time": "median CPU seconds of one forward and, of the losses, backward pass",
        "memory": "peak resident MB of a fresh process, three passes, less inputs and gradients",
        "methods": measure(repeats),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory", choices=METHODS, help="only print the extra MB of one method")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory:
        print(extra_mb(arguments.memory))
        return
    for name in METHODS:
        check(name)
    result = report(arguments.repeats)
    columns = ("forward_s", "total_s", "time_ratio", "extra_mb", "memory_ratio")
    print(f"{'method':16}" + "".join(f"{column:>14}" for column in columns))
    for name, row in result["methods"].items():
        print(f"{name:16}" + "".join(f"{row[column]:14.3f}" for column in columns))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
