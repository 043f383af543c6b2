"""linear_logprob on a GPU, beside what others would use: right first, then how fast.

    kernels/bench/device.sh                     # on a GPU, under 10 minutes
    kernels/bench/device.sh --tiny              # on a processor, in the interpreter: a rehearsal

Every line is printed when it is known, and no new measurement is begun after --seconds. Shape
letters: T tokens, H hidden, V vocabulary. Products are counted as 2 T H V operations, of which a
forward pass does one and a backward pass two; what is computed again does not count.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from credit_kernels import linear_logprob
from credit_kernels.logprob.cases import Case
from torch import Tensor

BACKENDS = ("torch", "rows", "tiles")
CHECKED = (
    Case(name="odd", tokens=300, hidden=512, rows=5003, total=5001, temperature=0.7),
    Case(name="capped", tokens=130, hidden=256, rows=1000, total=1000, softcap=30.0),
    Case(name="far", tokens=64, hidden=264, rows=777, total=777, offset=-200.0),
)
HEADS = (
    ("Qwen3 8B", 8192, 4096, 151936),
    ("Qwen3 8B, few tokens", 64, 4096, 151936),
    ("Qwen3 0.6B", 16384, 1024, 151936),
    ("Llama-3 70B, TP 8", 8192, 8192, 16032),
    ("Qwen3 8B, long", 32768, 4096, 151936),
)
TINY_CHECKED = (Case(name="odd", tokens=20, hidden=24, rows=203, total=201, temperature=0.7),)
TINY_HEADS = (("tiny", 40, 32, 300),)

Method = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden_TH, weight_VH, target_T) -> log-prob of each token."""


def naive(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> Tensor:
    logits_TV = (hidden_TH @ weight_VH.T).float()
    return torch.log_softmax(logits_TV, -1).gather(-1, target_T[:, None])[:, 0]


def torch_chunked(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=1024)
    loss_T = F.linear_cross_entropy(
        hidden_TH, weight_VH, target_T, reduction="none", options=options
    )
    return -loss_T


def liger(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return -liger_fused_linear_cross_entropy(hidden_TH, weight_VH, target_T, reduction="none")


def cut_cross_entropy(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    return -linear_cross_entropy(hidden_TH, weight_VH, target_T, reduction="none")


def methods() -> dict[str, Method]:
    """By name; other packages where they are installed. Ours make the entropy's sums too."""
    others = {"liger_kernel": liger, "cut_cross_entropy": cut_cross_entropy}
    return {
        **{name: partial(linear_logprob, backend=name) for name in BACKENDS},
        "naive": naive,
        "compiled naive": torch.compile(naive),
        "F.linear_cross_entropy": torch_chunked,
        **{name: method for name, method in others.items() if find_spec(name)},
    }


@dataclass(frozen=True)
class Timing:
    """Of one method on one head; milliseconds are medians, ranges the 20th to the 80th percent."""

    head: str
    method: str
    forward_ms: float
    forward_range_ms: tuple[float, float]
    backward_ms: float
    backward_range_ms: tuple[float, float]
    forward_tflops: float
    both_tflops: float
    extra_gb: float | None
    """Peak memory of a forward and a backward pass beyond inputs and gradients."""


def evaluate(compute: Callable, inputs: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor]:
    """logprob_T, entropy_T and the gradients of a mixture of them."""
    hidden_TH, weight_VH, target_T = inputs
    wanted = [value.to(dtype).clone().requires_grad_() for value in (hidden_TH, weight_VH)]
    outputs = compute(*wanted, target_T)
    ramp_T = torch.linspace(-1, 2, len(target_T), device=target_T.device)
    loss = sum((out * (ramp_T + index)).sum() for index, out in enumerate(outputs))
    return [*outputs, *torch.autograd.grad(loss, wanted)]


def errors(values: list[Tensor], truth: list[Tensor]) -> list[float]:
    pairs = zip(values, truth, strict=True)
    return [(value.double() - true).abs().max().item() for value, true in pairs]


def rounded_plain(
    case: Case, hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor
) -> tuple[Tensor, ...]:
    """The plain computation as models do it: products and their gradients in the inputs' type."""
    logits_TV = (hidden_TH @ weight_VH[: case.total].T).float()
    if case.softcap is not None:
        logits_TV = torch.tanh(logits_TV / case.softcap) * case.softcap
    logprob_TV = torch.log_softmax(logits_TV / case.temperature, -1)
    kept_T = target_T >= 0
    chosen_T = logprob_TV.gather(-1, torch.where(kept_T, target_T, 0)[:, None])[:, 0]
    return chosen_T * kept_T, -(logprob_TV.exp() * logprob_TV).sum(-1) * kept_T


def problems(case: Case, dtype: torch.dtype, backend: str, device: torch.device) -> list[str]:
    """What a backend gets wrong: errors beyond twice those of eager torch, and unequal bits.

    Outputs are held against eager torch with float32 logits, gradients against one whose products
    have the inputs' type.
    """
    inputs = tuple(value.to(device) for value in case.draw(dtype))
    truth = evaluate(case.plain, inputs, torch.float64)
    precise = errors(evaluate(case.plain, inputs, dtype), truth)
    rounded = errors(evaluate(partial(rounded_plain, case), inputs, dtype), truth)
    eager = [*precise[:2], *map(max, precise[2:], rounded[2:])]
    compute = partial(case.compute, backend=backend)
    values = evaluate(compute, inputs, dtype)
    names = ("log-prob", "entropy", "hidden's gradient", "weight's gradient")
    found = [
        f"{name}: error {mine:.2e}, allowed {2 * theirs + 1e-5:.2e}"
        for name, mine, theirs in zip(names, errors(values, truth), eager, strict=True)
        if not mine <= 2 * theirs + 1e-5
    ]
    if not all(map(torch.equal, values, evaluate(compute, inputs, dtype))):
        found.append("a second run has other bits")
    with torch.no_grad():
        if not all(map(torch.equal, values[:2], compute(*inputs))):
            found.append("scoring has other bits than training")
    return found


def check(cases: tuple[Case, ...], device: torch.device) -> bool:
    """Prints a line for every backend, case and type; whether all is well."""
    right = True
    for case in cases:
        for dtype in (torch.float32, torch.bfloat16):
            for backend in BACKENDS:
                found = problems(case, dtype, backend, device)
                right &= not found
                print(f"{case.name:8}{dtype!s:16}{backend:8}", "; ".join(found) or "right")
    return right


def clock(device: torch.device) -> float:
    """Seconds, after all work that was started."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def spread(samples: list[float]) -> tuple[float, float]:
    ordered = sorted(samples)
    return ordered[len(ordered) // 5], ordered[len(ordered) - 1 - len(ordered) // 5]


def measure(
    head: tuple[str, int, int, int], name: str, method: Method, device: torch.device, repeats: int
) -> Timing:
    label, num_tokens, hidden, vocabulary = head
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    case = Case(name=label, tokens=num_tokens, hidden=hidden, rows=vocabulary, total=vocabulary)
    torch.manual_seed(0)
    shapes = ((case.tokens, hidden), (vocabulary, hidden))
    hidden_TH, weight_VH = (
        torch.randn(shape, device=device, dtype=dtype).mul_(hidden**-0.25).requires_grad_()
        for shape in shapes
    )
    target_T = torch.randint(vocabulary, (num_tokens,), device=device)
    incoming_T = torch.linspace(-1, 1, num_tokens, device=device)
    forward, backward = [], []
    for repeat in range(repeats + 2):
        if device.type == "cuda" and repeat == 2:
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
        start = clock(device)
        logprob_T = method(hidden_TH, weight_VH, target_T)
        middle = clock(device)
        torch.autograd.grad(logprob_T, (hidden_TH, weight_VH), incoming_T.to(logprob_T.dtype))
        if repeat >= 2:
            forward.append(1e3 * (middle - start))
            backward.append(1e3 * (clock(device) - middle))
    extra_gb = None
    if device.type == "cuda":
        gradients = sum(value.numel() * value.element_size() for value in (hidden_TH, weight_VH))
        extra_gb = (torch.cuda.max_memory_allocated(device) - before - gradients) / 1e9
    forward_ms, backward_ms = statistics.median(forward), statistics.median(backward)
    product = 2 * num_tokens * hidden * vocabulary / 1e9
    return Timing(
        head=label,
        method=name,
        forward_ms=forward_ms,
        forward_range_ms=spread(forward),
        backward_ms=backward_ms,
        backward_range_ms=spread(backward),
        forward_tflops=product / forward_ms,
        both_tflops=3 * product / (forward_ms + backward_ms),
        extra_gb=extra_gb,
    )


def product_ceiling(device: torch.device, size: int) -> float:
    """TFLOP/s of the vendor's bfloat16 product of square matrices; of float32 on processors."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a_MK, b_KN = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    samples = []
    for _ in range(12):
        start = clock(device)
        torch.mm(a_MK, b_KN)
        samples.append(clock(device) - start)
    return 2 * size**3 / statistics.median(samples[2:]) / 1e12


def timings(
    heads: tuple[tuple[str, int, int, int], ...], device: torch.device, repeats: int, stop: float
) -> Iterator[Timing]:
    """Those that can be begun before the time is up; a method out of memory is left out."""
    for head in heads:
        for name, method in methods().items():
            if time.perf_counter() > stop:
                print(f"{head[0]:24}{name:24} not measured: the time is up")
                continue
            try:
                yield measure(head, name, method, device, repeats)
            except torch.OutOfMemoryError:
                print(f"{head[0]:24}{name:24} out of memory")


def line(timing: Timing) -> str:
    numbers = [
        timing.forward_ms,
        *timing.forward_range_ms,
        timing.backward_ms,
        *timing.backward_range_ms,
        timing.forward_tflops,
        timing.both_tflops,
    ]
    extra = "-" if timing.extra_gb is None else f"{timing.extra_gb:.2f}"
    cells = "".join(f"{number:10.3g}" for number in numbers)
    return f"{timing.head:24}{timing.method:24}{cells}{extra:>10}"


def main() -> int:
    """The exit status: 1 where a backend is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on the processor")
    parser.add_argument("--seconds", type=float, default=480, help="begin nothing later than this")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    arguments = parser.parse_args()
    stop = time.perf_counter() + arguments.seconds
    device = torch.device("cpu" if arguments.tiny else "cuda")
    name = "processor" if arguments.tiny else torch.cuda.get_device_name(device)
    right = check(TINY_CHECKED if arguments.tiny else CHECKED, device)
    ceiling = product_ceiling(device, 256 if arguments.tiny else 8192)
    print(f"{name}, torch {torch.__version__}, product of matrices {ceiling:.3g} TFLOP/s")
    heads = "fwd ms", "p20", "p80", "bwd ms", "p20", "p80", "fwd TF/s", "TF/s", "extra GB"
    print(f"{'head':24}{'method':24}" + "".join(f"{title:>10}" for title in heads))
    rows = []
    repeats = 1 if arguments.tiny else 10
    for timing in timings(TINY_HEADS if arguments.tiny else HEADS, device, repeats, stop):
        print(line(timing), flush=True)
        rows.append(asdict(timing))
    if arguments.out:
        report = {"device": name, "torch": torch.__version__, "product_tflops": ceiling}
        report |= {"right": right, "timings": rows}
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
