"""One trainer rank: `torchrun -m megatron_credit.trainer.worker RUN_DIRECTORY --engine ADDRESS`.

With `--load-rollouts PATH` it trains on recorded rollouts instead, and no engine is needed. Several
run directories are trained one after the other, with the same engine and from fresh weights.
"""

import argparse
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from megatron_credit.mcore import cpu_mode

cpu_mode.enable()  # before anything imports megatron

from transformers import AutoTokenizer  # noqa: E402

from megatron_credit.mcore.architecture import read_architecture  # noqa: E402
from megatron_credit.mcore.hf_files import write_checkpoint  # noqa: E402
from megatron_credit.mcore.parallel import start_parallel, stop_parallel  # noqa: E402
from megatron_credit.mcore.policy import Policy  # noqa: E402
from megatron_credit.rollouts.client import EngineClient  # noqa: E402
from megatron_credit.rollouts.server import end_with_parent  # noqa: E402
from megatron_credit.rollouts.sync import WeightSync  # noqa: E402
from megatron_credit.tasks.build import build_task  # noqa: E402
from megatron_credit.trainer.config import RunConfig  # noqa: E402
from megatron_credit.trainer.evidence_teacher import teacher_of  # noqa: E402
from megatron_credit.trainer.loaded_rollouts import LoadedRollouts  # noqa: E402
from megatron_credit.trainer.loaded_run import limits_of  # noqa: E402
from megatron_credit.trainer.loop import Rollouts, Trainer  # noqa: E402
from megatron_credit.trainer.recorded_steps import recorded_steps  # noqa: E402
from megatron_credit.trainer.recorder import RunRecorder, SilentRecorder  # noqa: E402
from megatron_credit.trainer.rollout_phase import EngineRollouts  # noqa: E402
from megatron_credit.trainer.run_directory import RunDirectory, checkpoint_step  # noqa: E402
from megatron_credit.trainer.sampler import Sampler  # noqa: E402
from megatron_credit.trainer.signals.build import open_credit_stage  # noqa: E402
from megatron_credit.trainer.training_policy import TrainingPolicy  # noqa: E402
from megatron_credit.trainer.worker_environment import engine_key, global_rank  # noqa: E402


@dataclass(frozen=True)
class Rank:
    """What this process has when the loop begins."""

    config: RunConfig
    directory: RunDirectory
    policy: Policy
    is_leader: bool
    """Rank 0 alone samples or reads rollouts, and writes."""
    last_step: int


@dataclass(frozen=True)
class Engine:
    """The engine as rank 0 reaches it."""

    client: EngineClient
    sync: WeightSync

    @classmethod
    def connect(cls, config: RunConfig, directory: RunDirectory, address: str) -> "Engine":
        """The engine at this address, which is ready when this returns."""
        client = EngineClient(
            address,
            request_timeout_s=config.engine.request_timeout_s,
            log_path=directory.logs / "engine.log",
            api_key=engine_key(),
        )
        client.wait_ready(config.engine.startup_timeout_s)
        return cls(client, WeightSync([client], config.engine))


def main() -> None:
    """Entry point of a rank; raises, and so ends the job, on any failure."""
    arguments = parse_arguments()
    end_with_parent()
    directories = [RunDirectory(path) for path in arguments.directory]
    redirect_output(directories[0].logs / f"trainer-{global_rank()}.log")
    engine = None
    for directory in directories:
        config = RunConfig.model_validate_json(directory.config.read_text())
        rank = start_rank(config, directory, arguments.checkpoint)
        if engine is None and arguments.engine is not None and rank.is_leader:
            engine = Engine.connect(config, directory, arguments.engine)
        if arguments.load_rollouts is not None:
            train(rank, loaded_rollouts(rank, arguments.load_rollouts))
        else:
            train(rank, engine_rollouts(rank, engine))
        export_model(config, directory, rank.policy, is_writer=rank.is_leader)
        stop_parallel(keep_world=directory is not directories[-1])


def start_rank(config: RunConfig, directory: RunDirectory, checkpoint: Path | None) -> Rank:
    """This process's part of a run, its weights loaded."""
    ranks = start_parallel(
        config.parallel, seed=config.run.seed, timeout_s=config.engine.request_timeout_s + 600
    )
    policy = Policy.build(
        policy=config.policy,
        optimizer=config.optimizer,
        parallel=config.parallel,
        ranks=ranks,
        seed=config.run.seed,
    )
    policy.add_teacher(teacher_of(config))
    last_step = 0
    if checkpoint is not None:
        policy.load(checkpoint)
        last_step = checkpoint_step(checkpoint)
    return Rank(config, directory, policy, is_leader=ranks.rank == 0, last_step=last_step)


def export_model(
    config: RunConfig, directory: RunDirectory, policy: Policy, *, is_writer: bool
) -> None:
    """Writes the trained model as a Hugging Face directory, in place of one of an earlier end."""
    if not is_writer:
        for _ in policy.weights():  # the gathers of a streamed tensor need every rank
            pass
        return
    shutil.rmtree(directory.model, ignore_errors=True)
    write_checkpoint(directory.model, policy.weights(), config.policy.model)


def train(rank: Rank, rollouts: Rollouts) -> None:
    """Puts the parts together and runs the loop."""
    config, directory, last_step = rank.config, rank.directory, rank.last_step
    recorder = (
        RunRecorder(config, directory, last_step=last_step) if rank.is_leader else SilentRecorder()
    )
    policy = TrainingPolicy(
        rank.policy, config=config, directory=directory, is_writer=rank.is_leader
    )
    with open_credit_stage(
        config,
        policy,
        max_positions=rank.policy.architecture.max_positions,
        has_records=rank.is_leader,
    ) as credit:
        Trainer(
            config=config,
            policy=policy,
            credit=credit,
            rollouts=rollouts,
            recorder=recorder,
            last_step=last_step,
        ).run()
    recorder.close()


def engine_rollouts(rank: Rank, engine: Engine | None) -> EngineRollouts:
    """Rollouts of the engine that rank 0 is connected to."""
    return EngineRollouts(
        config=rank.config,
        directory=rank.directory,
        policy=rank.policy,
        sampler=None if engine is None else build_sampler(rank.config, engine.client),
        sync=None if engine is None else engine.sync,
    )


def loaded_rollouts(rank: Rank, record: Path) -> LoadedRollouts:
    """The recorded rollouts of the steps that are still to be trained."""
    policy = rank.config.policy
    limits = limits_of(rank.config, read_architecture(policy.model, policy.converter))
    steps = recorded_steps(record, limits, first=rank.last_step + 1, last=rank.config.trainer.steps)
    return LoadedRollouts(
        config=rank.config, directory=rank.directory, steps=steps if rank.is_leader else None
    )


def build_sampler(config: RunConfig, client: EngineClient) -> Sampler:
    """The rollout side of rank 0."""
    tokenizer = AutoTokenizer.from_pretrained(config.policy.model, local_files_only=True)
    return Sampler(
        task=build_task(config.task, config.data, tokenizer=tokenizer, seed=config.run.seed),
        tokenizer=tokenizer,
        engine=client,
        sampling=config.sampling,
        attempts=config.attempts,
        seed=config.run.seed,
    )


def parse_arguments() -> argparse.Namespace:
    """The worker's command line, written by the launcher."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, nargs="+", help="run directories with config.json")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--engine", help="http address of the engine")
    source.add_argument("--load-rollouts", type=Path, help="directory or file of rollouts")
    parser.add_argument("--checkpoint", type=Path, help="checkpoint directory to go on from")
    return parser.parse_args()


def redirect_output(path: Path) -> None:
    """Sends this process's output, that of native code included, to its own log file."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())


if __name__ == "__main__":
    main()
