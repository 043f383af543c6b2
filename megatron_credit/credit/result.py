"""What a credit method gives back."""

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class CreditResult:
    """The advantage of each token, exactly 0 where the mask is False, and what to log."""

    advantage_NT: Tensor
    """[N, T] float32."""
    metrics: dict[str, float]
    """Always has `group/invalid_rewards`, the rollouts without a verdict, and `group/singleton`, 1
    where fewer than two rollouts have one."""
    evidence_weight_NT: Tensor | None = field(default=None, metadata={"dtype": torch.float32})
    """[N, T] float32, VERPO: the controller w."""
    evidence_mask_NT: Tensor | None = field(default=None, metadata={"dtype": torch.bool})
    """[N, T] bool, VERPO: trained tokens of rows with evidence; they share the evidence loss."""
    selected_NT: Tensor | None = field(default=None, metadata={"dtype": torch.bool})
    """[N, T] bool, RLCSD: tokens that got u; the objective averages them apart from the others."""
    distillation_mask_NT: Tensor | None = field(default=None, metadata={"dtype": torch.bool})
    """[N, T] bool, OPSD, SDPO, SRPO: trained tokens that share the distillation loss."""


EXTRAS: dict[str, torch.dtype] = {
    name: declared.metadata["dtype"]
    for name, declared in CreditResult.__dataclass_fields__.items()
    if "dtype" in declared.metadata
}
"""The type of each field that only some methods fill, by name."""


def no_credit(
    mask_NT: Tensor, metrics: dict[str, float], extras: Collection[str] = ()
) -> CreditResult:
    """0 for every token, in these extra fields too."""
    return CreditResult(
        advantage_NT=torch.zeros(mask_NT.shape, device=mask_NT.device),
        metrics=metrics,
        **{name: torch.zeros_like(mask_NT, dtype=EXTRAS[name]) for name in extras},
    )
