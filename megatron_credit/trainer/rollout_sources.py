"""Where the rollouts of a run come from, as each rank sees it: engines, or a record."""

from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

from megatron_credit.mcore.architecture import read_architecture
from megatron_credit.mcore.policy import Policy
from megatron_credit.rollouts.fleet import Fleet
from megatron_credit.rollouts.registry import FixedEngine, Registry
from megatron_credit.tasks.build import build_task
from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.loaded_rollouts import LoadedRollouts
from megatron_credit.trainer.loaded_run import limits_of
from megatron_credit.trainer.recorded_steps import recorded_steps
from megatron_credit.trainer.rollout_phase import EngineRollouts
from megatron_credit.trainer.run_directory import RunDirectory
from megatron_credit.trainer.sampler import Sampler
from megatron_credit.trainer.worker_environment import engine_key


@dataclass(frozen=True)
class Rank:
    """What this process has when the loop begins."""

    config: RunConfig
    directory: RunDirectory
    policy: Policy
    is_leader: bool
    """Rank 0 alone samples or reads rollouts, and writes."""
    last_step: int


def connect(config: RunConfig, directory: RunDirectory, where: str | Path) -> Fleet:
    """The engine at an address, or those that register in a directory; one at least is ready when
    this returns."""
    if isinstance(where, Path):
        source = Registry(where, logs=directory.logs)
    else:
        source = FixedEngine(where, directory.logs / "engine.log")
    fleet = Fleet(source, config.engine, api_key=engine_key())
    fleet.wait_ready(config.engine.startup_timeout_s)
    return fleet


def engine_rollouts(rank: Rank, fleet: Fleet | None) -> EngineRollouts:
    """Rollouts of the engines that rank 0 is connected to."""
    return EngineRollouts(
        config=rank.config,
        directory=rank.directory,
        policy=rank.policy,
        sampler=None if fleet is None else build_sampler(rank.config, fleet),
        fleet=fleet,
    )


def loaded_rollouts(rank: Rank, record: Path) -> LoadedRollouts:
    """The recorded rollouts of the steps that are still to be trained."""
    policy = rank.config.policy
    limits = limits_of(rank.config, read_architecture(policy.model, policy.converter))
    steps = recorded_steps(record, limits, first=rank.last_step + 1, last=rank.config.trainer.steps)
    return LoadedRollouts(
        config=rank.config, directory=rank.directory, steps=steps if rank.is_leader else None
    )


def build_sampler(config: RunConfig, fleet: Fleet) -> Sampler:
    """The rollout side of rank 0."""
    tokenizer = AutoTokenizer.from_pretrained(config.policy.model, local_files_only=True)
    return Sampler(
        task=build_task(config.task, config.data, tokenizer=tokenizer, seed=config.run.seed),
        tokenizer=tokenizer,
        engine=fleet,
        sampling=config.sampling,
        attempts=config.attempts,
        seed=config.run.seed,
    )
