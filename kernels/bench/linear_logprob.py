"""Time and memory of linear_logprob on this CPU, beside eager torch, forward and backward.

    python kernels/bench/linear_logprob.py --out kernels/bench/results/linear_logprob_cpu.json

Values and gradients are checked against float64 before anything is timed. Time is CPU time of one
thread, the methods taking turns so that they share what else the machine does. Memory is the peak
resident size of a fresh process over three passes, less what it had before and less the gradients,
which every method must return. Shape letters: T tokens, H hidden, V vocabulary.
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
import torch.nn.functional as F
from credit_kernels import linear_logprob
from credit_kernels.matmul import matmul_nt
from torch import Tensor

TEMPERATURE = 0.7
TOKENS, HIDDEN, VOCABULARY = 2048, 256, 32000
CHECKED_TOKENS = 128
BASELINES = {False: "eager", True: "eager_entropy"}

Method = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
"""(hidden_TH, weight_VH, target_T) -> logprob_T and, of some, entropy_T."""


class FastProduct(torch.autograd.Function):
    """hidden @ weight.T by our matrix product: eager torch without the handicap of MKL's."""

    @staticmethod
    def forward(ctx, hidden_TH: Tensor, weight_VH: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_TH, weight_VH)
        return matmul_nt(hidden_TH, weight_VH)

    @staticmethod
    def backward(ctx, grad_TV: Tensor) -> tuple[Tensor, Tensor]:
        hidden_TH, weight_VH = ctx.saved_tensors
        return matmul_nt(grad_TV, weight_VH.T), matmul_nt(grad_TV.T, hidden_TH.T)


def eager(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> tuple[Tensor, ...]:
    logprob_TV = torch.log_softmax(hidden_TH @ weight_VH.T / TEMPERATURE, -1)
    return (logprob_TV.gather(-1, target_T[:, None])[:, 0],)


def with_entropy(logits_TV: Tensor, target_T: Tensor) -> tuple[Tensor, ...]:
    logprob_TV = torch.log_softmax(logits_TV / TEMPERATURE, -1)
    entropy_T = -(logprob_TV.exp() * logprob_TV).sum(-1)
    return logprob_TV.gather(-1, target_T[:, None])[:, 0], entropy_T


def eager_entropy(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> tuple[Tensor, ...]:
    return with_entropy(hidden_TH @ weight_VH.T, target_T)


def eager_fast_product(
    hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor
) -> tuple[Tensor, ...]:
    return with_entropy(FastProduct.apply(hidden_TH, weight_VH), target_T)


def torch_chunked(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> tuple[Tensor, ...]:
    """torch's own chunked cross-entropy, which knows no entropy and no shards."""
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=256)
    scaled_TH = hidden_TH / TEMPERATURE
    loss_T = F.linear_cross_entropy(
        scaled_TH, weight_VH, target_T, reduction="none", options=options
    )
    return (-loss_T,)


def ours(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> tuple[Tensor, ...]:
    return (linear_logprob(hidden_TH, weight_VH, target_T, temperature=TEMPERATURE),)


def ours_entropy(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> tuple[Tensor, ...]:
    return linear_logprob(
        hidden_TH, weight_VH, target_T, temperature=TEMPERATURE, return_entropy=True
    )


METHODS: dict[str, Method] = {
    "eager": eager,
    "torch_chunked": torch_chunked,
    "ours": ours,
    "eager_entropy": eager_entropy,
    "eager_entropy_fast_product": eager_fast_product,
    "ours_entropy": ours_entropy,
}
HAS_ENTROPY = {name: "entropy" in name for name in METHODS}


def draw(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_TH = torch.randn(num_tokens, HIDDEN, generator=generator).requires_grad_()
    weight_VH = (torch.randn(VOCABULARY, HIDDEN, generator=generator) * 0.05).requires_grad_()
    return hidden_TH, weight_VH, torch.randint(VOCABULARY, (num_tokens,), generator=generator)


def loss(outputs: tuple[Tensor, ...]) -> Tensor:
    """A mixture with another weight for every token and output."""
    ramp_T = torch.linspace(-1, 1, len(outputs[0]), dtype=outputs[0].dtype)
    return sum((out * (ramp_T + index)).sum() for index, out in enumerate(outputs))


def evaluate(method: Method, inputs: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    outputs = method(*inputs)
    return [*outputs, *torch.autograd.grad(loss(outputs), inputs[:2])]


def check(name: str) -> None:
    """ValueError where a method errs more than twice as much as eager torch."""
    hidden_TH, weight_VH, target_T = draw(CHECKED_TOKENS)
    exact = tuple(value.detach().double().requires_grad_() for value in (hidden_TH, weight_VH))
    baseline = METHODS[BASELINES[HAS_ENTROPY[name]]]
    truth = evaluate(baseline, (*exact, target_T))
    eager_values = evaluate(baseline, (hidden_TH, weight_VH, target_T))
    values = evaluate(METHODS[name], (hidden_TH, weight_VH, target_T))
    for index, (value, theirs, true) in enumerate(zip(values, eager_values, truth, strict=True)):
        error, allowed = (value - true).abs().max(), 2 * (theirs - true).abs().max() + 1e-5
        if error > allowed:
            raise ValueError(f"{name}: error {error:.2e} of output {index}, allowed {allowed:.2e}")


def seconds(method: Method, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[float, float]:
    """CPU seconds of the forward pass, and of both."""
    start = time.process_time()
    outputs = method(*inputs)
    middle = time.process_time()
    torch.autograd.grad(loss(outputs), inputs[:2])
    return middle - start, time.process_time() - start


def status_kib(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def extra_mb(name: str) -> float:
    """Peak resident MB (10^6 bytes) of this process over three passes, less what must be there."""
    warm_up = torch.randn(8, 16, requires_grad=True), torch.randn(30, 16, requires_grad=True)
    evaluate(METHODS[name], (*warm_up, torch.arange(8)))
    inputs = draw(TOKENS)
    # 5 resets the high-water mark (proc(5), clear_refs).
    Path("/proc/self/clear_refs").write_text("5")
    before = status_kib("VmRSS")
    for _ in range(3):
        evaluate(METHODS[name], inputs)
    gradients = sum(value.numel() * value.element_size() for value in inputs[:2])
    return ((status_kib("VmHWM") - before) * 1024 - gradients) / 1e6


def measure(repeats: int) -> dict[str, dict[str, float]]:
    inputs = draw(TOKENS)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in METHODS}
    for _ in range(repeats + 1):
        for name, method in METHODS.items():
            samples[name].append(seconds(method, inputs))
    rows = {}
    for name, taken in samples.items():
        forward, both = (statistics.median(column) for column in zip(*taken[1:], strict=True))
        command = [sys.executable, __file__, "--memory", name]
        memory = float(subprocess.run(command, check=True, capture_output=True).stdout)
        rows[name] = {"forward_s": forward, "total_s": both, "extra_mb": memory}
    for name, row in rows.items():
        row["time_ratio"] = row["total_s"] / rows[BASELINES[HAS_ENTROPY[name]]]["total_s"]
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
        "tokens": TOKENS,
        "hidden": HIDDEN,
        "vocabulary": VOCABULARY,
        "temperature": TEMPERATURE,
        "repeats": repeats,
        "time": "median CPU seconds of one forward and backward pass; time_ratio is to eager torch "
        "with the same outputs",
        "memory": "peak resident MB of a fresh process, three passes, less inputs and gradients",
        "methods": measure(repeats),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--memory", choices=METHODS, help="only print the extra MB of one method")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory:
        print(extra_mb(arguments.memory))
        return
    for name in METHODS:
        check(name)
    result = report(arguments.repeats)
    print(f"{'method':28}{'forward s':>10}{'total s':>10}{'ratio':>8}{'extra MB':>10}")
    for name, row in result["methods"].items():
        print(
            f"{name:28}{row['forward_s']:10.3f}{row['total_s']:10.3f}{row['time_ratio']:8.2f}"
            f"{row['extra_mb']:10.0f}"
        )
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
