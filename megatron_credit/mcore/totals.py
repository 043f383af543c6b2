"""Sums and maxima of an optimizer step, brought together from all micro-batches and ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_credit.mcore.parallel import Ranks
from megatron_credit.objective.config import ObjectiveConfig
from megatron_credit.objective.loss import LossSums, TokenInputs, policy_loss

LOSS = "loss"


def expected_names(config: ObjectiveConfig) -> tuple[list[str], list[str]]:
    """Sorted names of the sums and of the maxima; the same on ranks that compute no loss."""
    none_T = torch.zeros(0)
    inputs = TokenInputs(
        policy_logprob_T=none_T,
        old_logprob_T=none_T,
        rollout_logprob_T=none_T,
        advantage_T=none_T,
        weight_T=none_T,
        mask_T=none_T.bool(),
        reference_logprob_T=none_T,
        entropy_T=none_T,
    )
    empty = policy_loss(inputs, config)
    return sorted(empty.sums), sorted(empty.maxima)


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Numbers of the whole optimizer step, the same on every rank."""

    sums: dict[str, float]
    """Those of `LossSums`, and the loss among them."""
    taught: dict[str, float]
    """Of each loss beside the surrogate."""
    maxima: dict[str, float]


def global_totals(
    parts: Sequence[LossSums],
    config: ObjectiveConfig,
    ranks: Ranks,
    device: torch.device,
    *,
    taught: Sequence[str] = (),
) -> Totals:
    """Sums and maxima over the whole step.

    `parts` are the micro-batches of this rank on the last pipeline stage, nothing elsewhere.
    `taught` names the losses beside the surrogate that each of them has. Collective over the data,
    context and pipeline ranks; tensor ranks hold the same numbers.
    """
    sum_names, max_names = expected_names(config)
    sum_names = [LOSS, *sum_names]
    sums = [{LOSS: part.loss, **part.sums} for part in parts]
    sum_K = torch.cat(
        [
            _stack(sums, sum_names, device).sum(0),
            _stack([part.taught for part in parts], taught, device).sum(0),
        ]
    )
    max_K = _stack([part.maxima for part in parts], max_names, device).amax(0)
    dist.all_reduce(sum_K, group=ranks.dp_cp_group)
    dist.all_reduce(max_K, dist.ReduceOp.MAX, group=ranks.dp_cp_group)
    both_K = torch.cat([sum_K, max_K])
    if ranks.pp_size > 1:
        dist.broadcast(both_K, group=ranks.pp_group, group_src=ranks.pp_size - 1)
    values = iter(both_K.tolist())
    # In the order in which they were put together.
    return Totals(
        sums={name: next(values) for name in sum_names},
        taught={name: next(values) for name in taught},
        maxima={name: next(values) for name in max_names},
    )


def _stack(
    parts: Sequence[Mapping[str, Tensor]], names: Sequence[str], device: torch.device
) -> Tensor:
    """[parts + 1, names] float64, the first row zero: every maximum here is at least 0."""
    rows_PK = torch.zeros(len(parts) + 1, len(names), dtype=torch.float64, device=device)
    for row_K, part in zip(rows_PK[1:], parts, strict=True):
        for place, name in enumerate(names):
            row_K[place] = part[name].detach()
    return rows_PK


def named_metrics(totals: Totals, *, count: float) -> dict[str, float]:
    """Means over the trained tokens, and maxima, under the names that metrics files use."""
    sums, maxima = totals.sums, totals.maxima
    tokens = sums["tokens"]
    metrics = {"loss": sums[LOSS] / count, "policy/tokens": tokens}
    means = {name: value for name, value in sums.items() if name not in (LOSS, "tokens")}
    for name, value in means.items():
        metrics[metric_name(name)] = value / max(tokens, 1.0)
    return metrics | {metric_name(name): value for name, value in maxima.items()}


def metric_name(name: str) -> str:
    """`mismatch/logprob_...` for the gap between the engine and the trainer, else `policy/...`."""
    if name.startswith("mismatch_"):
        return f"mismatch/logprob_{name.removeprefix('mismatch_')}"
    return f"policy/{name}"
