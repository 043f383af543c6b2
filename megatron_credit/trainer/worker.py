"""One trainer rank: `torchrun -m megatron_credit.trainer.worker RUN_DIRECTORY --engine ADDRESS`."""

import argparse
import os
import shutil
import sys
from pathlib import Path

from megatron_credit.mcore import cpu_mode

cpu_mode.enable()  # before anything imports megatron

from transformers import AutoTokenizer  # noqa: E402

from megatron_credit.credit import METHODS  # noqa: E402
from megatron_credit.mcore.hf_files import write_checkpoint  # noqa: E402
from megatron_credit.mcore.parallel import Ranks, start_parallel, stop_parallel  # noqa: E402
from megatron_credit.mcore.policy import Policy  # noqa: E402
from megatron_credit.rollouts.client import EngineClient  # noqa: E402
from megatron_credit.rollouts.server import end_with_parent  # noqa: E402
from megatron_credit.rollouts.sync import WeightSync  # noqa: E402
from megatron_credit.tasks import build_task  # noqa: E402
from megatron_credit.trainer.config import RunConfig  # noqa: E402
from megatron_credit.trainer.loop import Trainer  # noqa: E402
from megatron_credit.trainer.recorder import RunRecorder, SilentRecorder  # noqa: E402
from megatron_credit.trainer.rollout_phase import EngineRollouts  # noqa: E402
from megatron_credit.trainer.run_directory import RunDirectory, checkpoint_step  # noqa: E402
from megatron_credit.trainer.sampler import Sampler  # noqa: E402
from megatron_credit.trainer.training_policy import TrainingPolicy  # noqa: E402
from megatron_credit.trainer.worker_environment import engine_key, global_rank  # noqa: E402


def main() -> None:
    """Entry point of a rank; raises, and so ends the job, on any failure."""
    arguments = parse_arguments()
    end_with_parent()
    directory = RunDirectory(arguments.directory)
    redirect_output(directory.logs / f"trainer-{global_rank()}.log")
    config = RunConfig.model_validate_json(directory.config.read_text())
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
    last_step = 0
    if arguments.checkpoint is not None:
        policy.load(arguments.checkpoint)
        last_step = checkpoint_step(arguments.checkpoint)
    client = connect(config, directory, arguments.engine) if ranks.rank == 0 else None
    train(config, directory, policy, ranks=ranks, client=client, last_step=last_step)
    export_model(config, directory, policy, is_writer=client is not None)
    stop_parallel()


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


def train(
    config: RunConfig,
    directory: RunDirectory,
    policy: Policy,
    *,
    ranks: Ranks,
    client: EngineClient | None,
    last_step: int,
) -> None:
    """Puts the parts together and runs the loop; `client` is None on all ranks but 0."""
    is_leader = client is not None
    recorder = (
        RunRecorder(directory, num_steps=config.trainer.steps, last_step=last_step)
        if is_leader
        else SilentRecorder()
    )
    rollouts = EngineRollouts(
        config=config,
        directory=directory,
        policy=policy,
        sampler=build_sampler(config, client) if is_leader else None,
        sync=WeightSync([client], config.engine) if is_leader else None,
    )
    Trainer(
        config=config,
        policy=TrainingPolicy(policy, config=config, directory=directory, is_writer=is_leader),
        rollouts=rollouts,
        recorder=recorder,
        last_step=last_step,
        needs=METHODS[config.credit.method].needs,
    ).run()
    recorder.close()


def build_sampler(config: RunConfig, client: EngineClient) -> Sampler:
    """The rollout side of rank 0."""
    return Sampler(
        task=build_task(config.task),
        tokenizer=AutoTokenizer.from_pretrained(config.policy.model),
        engine=client,
        sampling=config.sampling,
        seed=config.run.seed,
    )


def connect(config: RunConfig, directory: RunDirectory, address: str) -> EngineClient:
    """A client of the engine, which is ready when this returns."""
    client = EngineClient(
        address,
        request_timeout_s=config.engine.request_timeout_s,
        log_path=directory.logs / "engine.log",
        api_key=engine_key(),
    )
    client.wait_ready(config.engine.startup_timeout_s)
    return client


def parse_arguments() -> argparse.Namespace:
    """The worker's command line, written by the launcher."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="run directory with config.json")
    parser.add_argument("--engine", required=True, help="http address of the engine")
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
