"""What a credit method gives back."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class CreditResult:
    """The advantage of each token, exactly 0 where the mask is False, and what to log."""

    advantage_NT: Tensor
    """[N, T] float32."""
    metrics: dict[str, float]
    """Always has `group/invalid_rewards`, the rollouts without a verdict, and `group/singleton`, 1
    where fewer than two rollouts have one."""
    evidence_weight_NT: Tensor | None = None
    """VERPO: the controller w."""
    evidence_mask_NT: Tensor | None = None
    """VERPO: trained tokens of rows with evidence, the denominator of the evidence loss."""
    selected_NT: Tensor | None = None
    """RLCSD: bool, the tokens that got u; the objective averages them apart from the others."""
