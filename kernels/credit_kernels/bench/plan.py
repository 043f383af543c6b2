"""What a benchmark measures, from the words of a command."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from credit_kernels.bench.methods import methods_of
from credit_kernels.bench.operations import OPERATIONS
from credit_kernels.bench.problem import Problem
from credit_kernels.bench.shapes import MODELS, parse_head

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DEFAULT_DTYPE = {"cpu": "fp32", "cuda": "bf16"}
DEFAULT_TOKENS = {"cpu": 2048, "cuda": 8192}
DEFAULT_HEADS = {"cpu": ("256x32000",), "cuda": tuple(model.name for model in MODELS)}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Problems, who computes them, and how often."""

    device: torch.device
    dtype: torch.dtype
    problems: Sequence[Problem]
    methods: Sequence[str]
    """Names; eager is always among them."""
    repeats: int


def make_plan(
    *,
    heads: Sequence[str] | None = None,
    tokens: int | None = None,
    ranks: Sequence[int] | None = None,
    operations: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    dtype: str | None = None,
    repeats: int = 5,
) -> Plan:
    """None stands for what suits the device, or for all. ValueError for a name nobody knows."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens = DEFAULT_TOKENS[device.type] if tokens is None else tokens
    precision = DTYPES[dtype or DEFAULT_DTYPE[device.type]]
    ranks = ranks or (1,)
    for name, value in (("tokens", tokens), ("repeats", repeats), ("tp", min(ranks))):
        if value < 1:
            raise ValueError(f"{name}={value}; expected at least 1")
    wanted = _chosen("operation", operations, [operation.name for operation in OPERATIONS])
    # By name, in the order of their first appearance.
    known = dict.fromkeys(
        method.name for operation in OPERATIONS for method in methods_of(operation)
    )
    problems = [
        Problem(
            operation=operation,
            head=parse_head(head).shard(size),
            tokens=tokens,
            dtype=precision,
            device=device,
        )
        for head in heads or DEFAULT_HEADS[device.type]
        for size in ranks
        for operation in OPERATIONS
        if operation.name in wanted
    ]
    chosen = _chosen("method", methods, list(known))
    return Plan(
        device=device,
        dtype=precision,
        problems=problems,
        methods=[*chosen, "eager"],
        repeats=repeats,
    )


def _chosen(kind: str, names: Sequence[str] | None, known: list[str]) -> list[str]:
    for name in names or ():
        if name not in known:
            raise ValueError(f"{kind} {name!r}; expected one of {known}")
    return list(names) if names else known
