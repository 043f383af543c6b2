"""The plain computation, with all logits in memory: the truth that backends are compared with."""

import torch
from torch import Tensor


def linear_logprob_reference(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    target_T: Tensor,
    *,
    total: int,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """logprob_T and entropy_T by autograd's own operations, in at least float32; one rank only."""
    compute = torch.promote_types(hidden_TH.dtype, torch.float32)
    logits_TV = hidden_TH.to(compute) @ weight_VH[:total].to(compute).T
    if softcap is not None:
        logits_TV = torch.tanh(logits_TV / softcap) * softcap
    logprob_TV = torch.log_softmax(logits_TV / temperature, -1)
    kept_T = (target_T >= 0) & (target_T < total)
    index_T1 = torch.where(kept_T, target_T, 0)[:, None]
    chosen_T = logprob_TV.gather(-1, index_T1)[:, 0]
    entropy_T = -(logprob_TV.exp() * logprob_TV).sum(-1)
    zero_T = torch.zeros_like(chosen_T)
    return torch.where(kept_T, chosen_T, zero_T), torch.where(kept_T, entropy_T, zero_T)
