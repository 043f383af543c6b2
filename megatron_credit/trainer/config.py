"""The configuration of a run: a closed, frozen TOML file, sections owned by their packages."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from megatron_credit.data.config import DataConfig
from megatron_credit.mcore.config import OptimizerConfig, ParallelConfig, PolicyConfig
from megatron_credit.objective.config import ObjectiveConfig
from megatron_credit.rewards.prm.config import PrmConfig
from megatron_credit.rollouts.config import AttemptsConfig, EngineConfig, SamplingConfig
from megatron_credit.settings import Settings
from megatron_credit.tasks import TaskConfig
from megatron_credit.trainer.launch_section import LaunchSection
from megatron_credit.trainer.loggers import LoggersSection
from megatron_credit.trainer.signals.config import (
    EvidenceSection,
    ProbesSection,
    SaliencySection,
)


class RunSection(Settings):
    """Where the run lives and how it starts."""

    directory: Path
    """Everything the run writes: configuration, metrics, rollouts, checkpoints, logs, pictures."""
    seed: int = Field(1, ge=0)
    """Order of prompts, sampling seeds and random weights follow from it."""
    resume: Literal["auto", "never"] | Path = "auto"
    """auto: go on from the newest checkpoint of the directory; never: start over, which needs an
    empty directory; a path: start from that checkpoint directory."""
    allow_new_data: bool = False
    """Go on from a checkpoint although the prompts or the answers changed since it was written."""
    processes: int | None = Field(None, ge=1)
    """Trainer processes; a multiple of tensor x pipeline x context, which is the default. A run
    that is launched over nodes has those of its nodes."""
    hang_timeout_s: float = Field(1800.0, gt=0)
    """Seconds without any progress after which a rank ends the run and names those that are behind;
    longer than the longest phase of a step."""


class CreditSection(Settings):
    """Which method turns rewards and signals into an advantage for each token."""

    method: str = "grpo"
    """A name of `megatron_credit.credit.METHODS`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Hyper-parameters of the method, checked by the method."""


class TrainerSection(Settings):
    """Sizes of a step."""

    steps: int = Field(ge=0)
    """Rollout steps of the whole run, resumed parts included."""
    prompts_per_step: int = Field(16, ge=1)
    """Prompt groups of a step."""
    samples_per_prompt: int = Field(8, ge=1)
    """Rollouts of a group, N."""
    resample_tries: int = Field(0, ge=0)
    """How often groups whose rewards are all equal are replaced by groups of further prompts, at
    most (DAPO, 2503.14476); what is equal after the last try stays. 0: never."""
    updates_per_step: int = Field(1, ge=1)
    """Optimizer steps that a step's groups are split into; above 1, the old log-probs are scored
    once before the first."""
    check_sync: bool = False
    """After each weight sync compare the engine's log-probs with the trainer's on one prompt."""
    sync_tolerance: float = Field(1e-3, gt=0)
    """Largest absolute log-prob difference that `check_sync` accepts, in nats."""


class EvaluationSection(Settings):
    """Accuracy on held-out prompts."""

    every: int = Field(10, ge=0)
    """Steps between evaluations; also before the first and after the last step. 0 turns it off."""
    greedy: bool = True
    """Also measure greedy accuracy."""


class CheckpointSection(Settings):
    """Checkpoints of the training state."""

    every: int = Field(10, ge=0)
    """Steps between checkpoints; one is always written after the last step. 0: only that one."""
    keep_last: int = Field(2, ge=1)
    """Older ones are deleted, but for those of `keep_every`."""
    keep_every: int = Field(0, ge=0)
    """Checkpoints of steps that are a multiple of this are never deleted; 0: none of them."""
    asynchronous: bool = True
    """Write while the run goes on: a save copies the state to the CPU's memory, and the next save
    waits for it."""


class RunConfig(Settings):
    """The whole configuration of `megatron-credit train`."""

    run: RunSection
    data: DataConfig | None = None
    task: TaskConfig | None = None
    policy: PolicyConfig
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    engine: EngineConfig = EngineConfig()
    sampling: SamplingConfig
    attempts: AttemptsConfig | None = None
    credit: CreditSection = CreditSection()
    evidence: EvidenceSection = EvidenceSection()
    saliency: SaliencySection = SaliencySection()
    probes: ProbesSection = ProbesSection()
    prm: PrmConfig | None = None
    objective: ObjectiveConfig = ObjectiveConfig()
    trainer: TrainerSection
    evaluation: EvaluationSection = EvaluationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    loggers: LoggersSection = LoggersSection()
    launch: LaunchSection = LaunchSection()

    @model_validator(mode="after")
    def _sections_agree(self) -> "RunConfig":
        if (self.data is None) == (self.task is None):
            raise ValueError(
                "a run needs either [data], your own files, or [task], a generated task; got "
                + ("neither" if self.data is None else "both")
            )
        sizes = self.trainer
        if sizes.prompts_per_step % sizes.updates_per_step:
            raise ValueError(
                f"trainer.prompts_per_step={sizes.prompts_per_step} is not divisible by "
                f"trainer.updates_per_step={sizes.updates_per_step}; use one of "
                f"{divisors(sizes.prompts_per_step)} updates"
            )
        if self.objective.kl_coef > 0:
            raise ValueError(
                "objective.kl_coef > 0 needs log-probs of a reference policy, which no part of "
                "this version computes; set it to 0"
            )
        model_parallel = self.model_parallel_size
        if self.num_processes % model_parallel:
            raise ValueError(
                f"run.processes={self.num_processes} is not a multiple of tensor x pipeline x "
                f"context = {model_parallel}; use {model_parallel} x the data-parallel size"
            )
        return self

    @property
    def max_attempts(self) -> int:
        """Attempts of a rollout at most."""
        return 1 if self.attempts is None else self.attempts.max_attempts

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.parallel.tensor * self.parallel.pipeline * self.parallel.context

    @property
    def num_processes(self) -> int:
        """Trainer ranks."""
        return self.run.processes or self.model_parallel_size


def divisors(number: int) -> list[int]:
    """The positive divisors of a positive number, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]
