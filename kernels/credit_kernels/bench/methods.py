"""Who computes an operation: eager torch, our backends, torch.compile, and other packages.

Those are imported where they run only. Liger and cut-cross-entropy know no temperature in some of
their losses; the hidden states are then scaled, which is counted as theirs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from shutil import which

import torch
import torch.nn.functional as F
from torch import Tensor

from credit_kernels.bench.operations import TEMPERATURE, Compute, Operation

CHUNK = {"cpu": 256, "cuda": 1024}
"""Tokens of a chunk of F.linear_cross_entropy; products of few rows do not fill a GPU."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to compute an operation."""

    name: str
    compute: Compute
    ours: bool = False
    rounds: bool = True
    """Logits are rounded to the type of the inputs, as eager torch does."""
    package: str | None = None
    """Has to be installed."""
    needs_gpu: bool = False

    def refusal(self, device: torch.device) -> str | None:
        """Why it cannot run here; None if it is worth a try."""
        if self.package is not None and find_spec(self.package) is None:
            return f"{self.package} is not installed"
        if self.needs_gpu and device.type != "cuda":
            return "needs a GPU"
        if self.name == "torch.compile" and device.type == "cpu" and which("g++") is None:
            return "needs the compiler g++"
        return None


def methods_of(operation: Operation) -> list[Method]:
    """Eager torch, which the others are compared with, comes first."""
    return [
        Method(name="eager", compute=operation.eager),
        Method(name="torch.compile", compute=Compiled(operation.eager)),
        *(method for name, method in OTHERS if name == operation.name),
        *(
            Method(
                name=f"ours-{backend}",
                compute=operation.by(backend),
                ours=True,
                rounds=False,
                # Triton's interpreter would run on a CPU too, but its time says nothing.
                needs_gpu=backend != "torch",
            )
            for backend in operation.backends
        ),
    ]


class Compiled:
    """A function that is compiled at its first call: importing a benchmark compiles nothing."""

    def __init__(self, function: Compute) -> None:
        self.function = function
        self.compiled: Callable[..., tuple[Tensor, ...]] | None = None

    def __call__(self, hidden: Tensor, weight_VH: Tensor, target_T: Tensor) -> tuple[Tensor, ...]:
        """What the function returns."""
        if self.compiled is None:
            self.compiled = torch.compile(self.function, dynamic=False)
        return self.compiled(hidden, weight_VH, target_T)


def chunked_cross_entropy(
    hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor
) -> tuple[Tensor, ...]:
    """torch's own, which makes the gradient in the forward pass."""
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=CHUNK[hidden_TH.device.type])
    return (F.linear_cross_entropy(hidden_TH, weight_VH, target_T, options=options),)


def chunked_logprob(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> tuple[Tensor, ...]:
    """torch's own, without reduction."""
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=CHUNK[hidden_TH.device.type])
    loss_T = F.linear_cross_entropy(
        hidden_TH / TEMPERATURE, weight_VH, target_T, reduction="none", options=options
    )
    return (-loss_T,)


def liger_cross_entropy(
    hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor
) -> tuple[Tensor, ...]:
    """Liger's fused linear cross-entropy, its weight gradient summed in float32."""
    from liger_kernel.transformers.functional import (  # pyright: ignore[reportMissingImports]
        liger_fused_linear_cross_entropy,
    )

    loss = liger_fused_linear_cross_entropy(
        hidden_TH, weight_VH, target_T, accum_dtype=torch.float32
    )
    return (loss,)


def liger_logprob(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> tuple[Tensor, ...]:
    """The chunked log-prob in Liger's PPO and GRPO losses."""
    from liger_kernel.chunked_loss.fused_linear_ppo import (  # pyright: ignore[reportMissingImports]
        LigerFusedLinearPPOBase,
    )

    logprob_1T = LigerFusedLinearPPOBase.chunk_forward(
        hidden_TH[None], weight_VH, target_T[None], temperature=TEMPERATURE
    )
    return (logprob_1T[0],)


def liger_logprob_entropy(
    hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor
) -> tuple[Tensor, ...]:
    """Liger's scaled cross-entropy: a fused kernel on Hopper, chunks elsewhere."""
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import (  # pyright: ignore[reportMissingImports]
        LigerFusedLinearScaledCrossEntropyFunction,
    )

    loss_T, entropy_T = LigerFusedLinearScaledCrossEntropyFunction.apply(
        hidden_TH, weight_VH, target_T, TEMPERATURE, return_entropy=True
    )
    return -loss_T, entropy_T


def cut_cross_entropy(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> tuple[Tensor, ...]:
    """Apple's, without the filter that leaves small gradients out."""
    return (_cut(hidden_TH, weight_VH, target_T, "mean"),)


def cut_logprob(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> tuple[Tensor, ...]:
    """Apple's, without reduction and filter."""
    return (-_cut(hidden_TH / TEMPERATURE, weight_VH, target_T, "none"),)


def _cut(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor, reduction: str) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy  # pyright: ignore[reportMissingImports]

    return linear_cross_entropy(
        hidden_TH, weight_VH, target_T, reduction=reduction, filter_eps=None
    )


LIGER, CUT = "liger_kernel", "cut_cross_entropy"
OTHERS: Sequence[tuple[str, Method]] = (
    ("cross_entropy", Method(name="F.linear_cross_entropy", compute=chunked_cross_entropy)),
    (
        "cross_entropy",
        Method(name="liger", compute=liger_cross_entropy, package=LIGER, needs_gpu=True),
    ),
    (
        "cross_entropy",
        Method(name="cut-cross-entropy", compute=cut_cross_entropy, package=CUT, needs_gpu=True),
    ),
    ("logprob", Method(name="F.linear_cross_entropy", compute=chunked_logprob)),
    ("logprob", Method(name="liger", compute=liger_logprob, package=LIGER)),
    (
        "logprob",
        Method(name="cut-cross-entropy", compute=cut_logprob, package=CUT, needs_gpu=True),
    ),
    ("logprob_entropy", Method(name="liger", compute=liger_logprob_entropy, package=LIGER)),
)
"""By the operation that they compute."""
