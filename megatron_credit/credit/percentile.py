"""The percentile of any number of values: torch.quantile refuses more than 2^24."""

import math

from torch import Tensor


def percentile(value_J: Tensor, percent: float) -> float:
    """The value below which `percent` of the values lie, with linear interpolation; 0 of none."""
    if not len(value_J):
        return 0.0
    sorted_J = value_J.double().sort().values
    place = percent / 100 * (len(sorted_J) - 1)
    low, high = sorted_J[math.floor(place)], sorted_J[math.ceil(place)]
    return float(low + (high - low) * (place - math.floor(place)))
