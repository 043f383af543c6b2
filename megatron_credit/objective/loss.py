"""The loss of a packed micro-batch: a sum, never a mean."""

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from megatron_credit.objective.config import ObjectiveConfig
from megatron_credit.objective.importance import importance_correction
from megatron_credit.objective.kl import kl_estimate
from megatron_credit.objective.ratio import masked, probability_ratio
from megatron_credit.objective.surrogate import clip_hits, clipped_surrogate


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenInputs:
    """What the objective knows of each token; values where the mask is False may be NaN.

    All of one shape, else ValueError. Log-probs are in nats, at the sampling temperature.
    """

    policy_logprob_T: Tensor
    """Log-prob under the policy being trained; the only input with a gradient besides entropy."""
    old_logprob_T: Tensor
    """Log-prob under the policy that the ratio refers to."""
    rollout_logprob_T: Tensor
    """Log-prob that the engine reported when it sampled the token."""
    advantage_T: Tensor
    weight_T: Tensor
    """Normalisation weight."""
    mask_T: Tensor
    """bool: trained tokens."""
    reference_logprob_T: Tensor | None
    """Log-prob under the policy that the KL term holds on to; None where there is no KL term."""
    entropy_T: Tensor | None
    """Entropy of the policy's distribution, for the metrics only."""

    def __post_init__(self) -> None:
        expected = tuple(self.policy_logprob_T.shape)
        for declared in fields(self):
            value_T = vars(self)[declared.name]
            if value_T is not None and tuple(value_T.shape) != expected:
                raise ValueError(
                    f"{declared.name} has shape {tuple(value_T.shape)}, expected {expected} as "
                    "policy_logprob_T"
                )
        if self.mask_T.dtype != torch.bool:
            raise ValueError(f"mask_T has type {self.mask_T.dtype}, expected torch.bool")


@dataclass(frozen=True, kw_only=True, eq=False)
class LossSums:
    """What a micro-batch adds to the step. The key sets depend on the configuration alone, so ranks
    can reduce the values in sorted order."""

    loss: Tensor
    """Scalar with gradient: weighted sum of the token losses, not yet divided by anything."""
    sums: dict[str, Tensor]
    """float64 scalars, detached: plain sums over the trained tokens; `tokens` counts them."""
    maxima: dict[str, Tensor]
    """Scalars >= 0 without gradient."""
    taught: dict[str, Tensor] = field(default_factory=dict)
    """Scalars, detached: sums of the losses beside the surrogate, which have counts of their own;
    `policy_loss` knows of none."""


def policy_loss(inputs: TokenInputs, config: ObjectiveConfig) -> LossSums:
    """Sum over tokens of weight x correction x clipped surrogate, plus kl_coef x weight x KL.

    ValueError where a KL term is asked for and there are no reference log-probs.
    """
    mask_T = inputs.mask_T
    advantage_T = masked(inputs.advantage_T, mask_T)
    weight_T = masked(inputs.weight_T, mask_T)
    clips = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    ratio_T = probability_ratio(inputs.policy_logprob_T, inputs.old_logprob_T.detach(), mask_T)
    correction = importance_correction(
        inputs.old_logprob_T,
        inputs.rollout_logprob_T,
        mask_T,
        kind=config.importance,
        cap=config.importance_cap,
    )
    loss_T = correction.weight_T * clipped_surrogate(ratio_T, advantage_T, **clips)
    low_T, high_T = clip_hits(ratio_T.detach(), advantage_T, **clips)
    sums = {
        "ratio": masked(ratio_T.detach(), mask_T),
        "clip_low": low_T & mask_T,
        "clip_high": high_T & mask_T,
        "importance_truncated": correction.changed_T,
        "tokens": mask_T,
        "entropy": _entropy(inputs),
    }
    if config.kl_coef > 0:
        kl_T = _reference_kl(inputs, config)
        loss_T = loss_T + config.kl_coef * kl_T
        sums["kl_reference"] = kl_T.detach()
    mismatch, maxima = _mismatch(inputs)
    sums |= mismatch
    return LossSums(
        loss=(weight_T * loss_T).sum(),
        sums={name: value_T.sum(dtype=torch.float64) for name, value_T in sums.items()},
        maxima=maxima,
    )


def _entropy(inputs: TokenInputs) -> Tensor:
    """Zeros where none was measured: the key is there anyway, for the ranks that did measure it."""
    if inputs.entropy_T is None:
        return torch.zeros_like(inputs.policy_logprob_T)
    return masked(inputs.entropy_T.detach(), inputs.mask_T)


def _reference_kl(inputs: TokenInputs, config: ObjectiveConfig) -> Tensor:
    if inputs.reference_logprob_T is None:
        raise ValueError(
            f"kl_coef={config.kl_coef} needs the reference policy's log-probs, but the batch has "
            "none"
        )
    return kl_estimate(
        masked(inputs.policy_logprob_T, inputs.mask_T),
        masked(inputs.reference_logprob_T, inputs.mask_T),
        config.kl_estimator,
    )


def _mismatch(inputs: TokenInputs) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """How far the engine's log-probs are from the trainer's for the same weights, in nats."""
    old_T = masked(inputs.old_logprob_T.detach(), inputs.mask_T)
    rollout_T = masked(inputs.rollout_logprob_T, inputs.mask_T)
    gap_T = (old_T - rollout_T).abs()
    largest = gap_T.max() if gap_T.numel() else gap_T.new_zeros(())
    sums = {"mismatch_abs": gap_T, "mismatch_k3": kl_estimate(rollout_T, old_T, "k3")}
    return sums, {"mismatch_abs_max": largest}
