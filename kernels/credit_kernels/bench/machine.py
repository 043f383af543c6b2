"""What this machine can do at most, and the state it was in."""

import datetime
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor

from credit_kernels.bench.clock import elapsed, stamp
from credit_kernels.matmul import matmul_nt

TRIES = 5
PRODUCT_SIZES = {"cpu": 2048, "cuda": 8192}
COPY_BYTES = {"cpu": 2**28, "cuda": 2**31}


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """The best of a few tries, in the type that is benchmarked."""

    flop_per_s: float
    """Of a square matrix product, by torch.mm or `matmul_nt`."""
    bytes_per_s: float
    """Read and written by a copy of what no cache holds."""


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """On a CPU of the one thread that this process uses."""
    size = PRODUCT_SIZES[device.type]
    a_NN = torch.randn(size, size, dtype=dtype, device=device)
    source = torch.ones(COPY_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    product = min(
        _best(lambda: a_NN @ a_NN.T, device), _best(lambda: matmul_nt(a_NN, a_NN), device)
    )
    copy = _best(lambda: target.copy_(source), device)
    return Ceilings(flop_per_s=2 * size**3 / product, bytes_per_s=2 * source.nbytes / copy)


def _best(work: Callable[[], Tensor], device: torch.device) -> float:
    def once() -> float:
        start = stamp(device)
        work()
        return elapsed(start, stamp(device))

    once()
    return min(once() for _ in range(TRIES))


def machine_state(device: torch.device) -> dict[str, str | int | float]:
    """What a reader has to know to judge the figures."""
    cpu = _cpu_model()
    return {
        "device": cpu if device.type == "cpu" else torch.cuda.get_device_name(device),
        "device_type": device.type,
        "cpu": cpu,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "liger-kernel": _version("liger-kernel"),
        "cut-cross-entropy": _version("cut-cross-entropy"),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "load_average": load_average(),
    }


def load_average() -> float:
    """Of the last minute; 1 is the benchmark itself."""
    return round(os.getloadavg()[0], 1)


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
