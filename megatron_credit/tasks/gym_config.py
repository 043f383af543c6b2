"""Configuration of a mix of reasoning-gym datasets; light to import."""

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from megatron_credit.rewards.config import AnswerPlace, PoolConfig
from megatron_credit.settings import Settings

# reasoning-gym draws item i from the seed `seed + i`: each dataset has this many seeds of its own.
SEEDS_PER_DATASET = 1_000_000
# Some datasets prepare as many items as they are told they have.
ITEMS_PER_DATASET = 100_000


class GymDatasetConfig(Settings):
    """One dataset of the mix."""

    name: str = Field(min_length=1)
    """Its name in reasoning-gym, such as chain_sum or letter_counting."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the prompts, in proportion to the other weights."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the dataset, by reasoning-gym's names, such as min_terms."""

    @field_validator("options")
    @classmethod
    def _no_seed(cls, options: dict[str, Any]) -> dict[str, Any]:
        taken = sorted({"seed", "size"} & options.keys())
        if taken:
            raise ValueError(
                f"options holds {' and '.join(taken)}, which the mix decides; use the task's seed, "
                "eval_seed and eval_size"
            )
        return options


class GymMixConfig(Settings):
    """Which generated questions are asked, and how many are held out for evaluation."""

    kind: Literal["gym"] = "gym"
    """Which task this is."""
    datasets: tuple[GymDatasetConfig, ...] = Field(min_length=1)
    """The datasets that questions are drawn from."""
    instruction: str = "Give the final answer between <answer> and </answer>."
    """A last line of every question; empty for none."""
    answer_in: AnswerPlace = "auto"
    """Where the answer stands in a response; see the verifiers."""
    seed: int = Field(default=10_000_000, ge=0)
    """Training questions are drawn from this seed on."""
    eval_seed: int = Field(default=1_000_000_000, ge=0)
    """Held-out questions are drawn from this seed on; it must be far from `seed`."""
    eval_size: int = Field(default=256, ge=1)
    """Number of held-out questions of all datasets together, all different."""
    verifier_pool: PoolConfig = PoolConfig()
    """The processes that check answers: some datasets take long to."""

    @model_validator(mode="after")
    def _seeds_apart(self) -> Self:
        needed = len(self.datasets) * SEEDS_PER_DATASET
        distance = abs(self.seed - self.eval_seed)
        if distance < needed:
            raise ValueError(
                f"seed = {self.seed} and eval_seed = {self.eval_seed} are {distance} apart, so "
                f"training would see held-out questions; keep them {needed} apart"
            )
        return self
