"""Figures of one group for the log."""

from torch import Tensor

from megatron_credit.credit.percentile import percentile


def mean(values: Tensor) -> float:
    """The mean of any numbers, of bools the share of True; 0 where there are none."""
    return float(values.double().mean()) if values.numel() else 0.0


def weight_metrics(weight_M: Tensor) -> dict[str, float]:
    """Mean, 10th and 90th percentile of the factors on M tokens' advantages; 1 where M = 0."""
    if not len(weight_M):
        weight_M = weight_M.new_ones(1)
    return {
        "credit/weight_mean": mean(weight_M),
        "credit/weight_p10": percentile(weight_M, 10),
        "credit/weight_p90": percentile(weight_M, 90),
    }
