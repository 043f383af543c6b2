"""Configuration of the objective."""

from typing import Literal

from pydantic import Field, model_validator

from megatron_credit.settings import Settings


class ObjectiveConfig(Settings):
    """The clipped surrogate, its KL term, its off-policy correction and its normalisation."""

    clip_low: float = Field(0.2, gt=0, lt=1)
    """Lower clip: ratio >= 1 - this."""
    clip_high: float = Field(0.2, gt=0)
    """Upper clip: ratio <= 1 + this. Larger than the lower, it keeps rare tokens (2503.14476)."""
    normalisation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """What the loss sum of an optimizer step is divided by, once: its trained tokens; its rollouts
    that have any, after a mean over the tokens of each; its rollouts times `constant_length`."""
    constant_length: int | None = Field(None, ge=1)
    """Tokens a rollout counts as under `constant`, normally the longest response allowed."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of KL(policy || reference); 0 turns it off."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """From the sampled token: log-ratio, half its square, or exp(-x) - 1 + x."""
    importance: Literal["none", "truncate", "mask"] = "truncate"
    """Correction of the engine's log-probs towards the trainer's: weight each token with their
    ratio up to the cap, or drop tokens whose ratio is outside [1 / cap, cap]."""
    importance_cap: float = Field(2.0, ge=1)
    """The cap c of the correction."""

    @model_validator(mode="after")
    def _constant_has_a_length(self) -> "ObjectiveConfig":
        if self.normalisation == "constant" and self.constant_length is None:
            raise ValueError(
                "normalisation='constant' divides by rollouts x constant_length; set "
                "constant_length, normally to the longest response allowed"
            )
        return self
