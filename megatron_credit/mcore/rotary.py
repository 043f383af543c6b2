"""The frequencies of the rotary embedding.

Computed in float32 by the same operations as in transformers, and so to the same bits: at position
100,000 an error of one unit in the last place already turns a head by 0.006.

Shape letter: F frequencies, half the size of a head.
"""

import math

import torch
from torch import Tensor

from megatron_credit.mcore.architecture import Architecture
from megatron_credit.mcore.rope_scaling import LinearScaling, Llama3Scaling, YarnScaling


def frequencies(architecture: Architecture) -> Tensor:
    """[F], radians a token, float32 on the CPU."""
    plain_F = _plain(architecture)
    match architecture.rope_scaling:
        case LinearScaling(factor=factor):
            return plain_F / factor
        case Llama3Scaling() as scaling:
            return _llama3(plain_F, scaling)
        case YarnScaling() as scaling:
            return _yarn(architecture, scaling)
        case None:
            return plain_F


def score_scale(architecture: Architecture) -> float:
    """Factor of query times key before the softmax.

    YaRN scales the rotated queries and keys; on whole heads that is a scale of their product.
    """
    scaling = architecture.rope_scaling
    attention = scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0
    return attention**2 / math.sqrt(architecture.head_dim)


def _plain(architecture: Architecture) -> Tensor:
    return 1.0 / _wavelengths(architecture)


def _wavelengths(architecture: Architecture) -> Tensor:
    """[F], tokens a radian, without scaling."""
    head_dim = architecture.head_dim
    exponent_F = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return architecture.rope_theta**exponent_F


def _llama3(plain_F: Tensor, scaling: Llama3Scaling) -> Tensor:
    original, factor = scaling.original_positions, scaling.factor
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength_F = 2 * math.pi / plain_F
    blend_F = (original / wavelength_F - low) / (high - low)
    blended_F = (1 - blend_F) * plain_F / factor + blend_F * plain_F
    is_low_F = wavelength_F > original / low
    is_high_F = wavelength_F < original / high
    return torch.where(is_low_F, plain_F / factor, torch.where(is_high_F, plain_F, blended_F))


def _yarn(architecture: Architecture, scaling: YarnScaling) -> Tensor:
    wavelength_F = _wavelengths(architecture)
    kept_F = 1 - _ramp(architecture, scaling)
    stretched_F = 1.0 / (scaling.factor * wavelength_F)
    return stretched_F * (1 - kept_F) + 1.0 / wavelength_F * kept_F


def _ramp(architecture: Architecture, scaling: YarnScaling) -> Tensor:
    """[F], 0 where a frequency is kept, 1 where it is divided by the factor."""
    head_dim = architecture.head_dim

    def dimension(turns: float) -> float:
        """The dimension whose frequency makes this many turns over the original window."""
        ratio = scaling.original_positions / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(architecture.rope_theta))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # as transformers does: a step instead of a division by zero
    index_F = torch.arange(head_dim // 2, dtype=torch.float32)
    return ((index_F - first) / (last - first)).clamp(0, 1)
