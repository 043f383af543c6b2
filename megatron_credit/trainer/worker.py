"""One trainer rank: `torchrun -m megatron_credit.trainer.worker RUN_DIRECTORY --engine ADDRESS`.

With `--load-rollouts PATH` it trains on recorded rollouts instead, and no engine is needed. Several
run directories are trained one after the other, with the same engine and from fresh weights. In a
launched run, `--attempt` names the files by which supervisor and ranks speak to each other.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

from megatron_credit.mcore import cpu_mode

cpu_mode.enable()  # before anything imports megatron

from megatron_credit.mcore.exchange import is_lost_peer  # noqa: E402
from megatron_credit.mcore.hf_files import write_checkpoint  # noqa: E402
from megatron_credit.mcore.parallel import Ranks, start_parallel, stop_parallel  # noqa: E402
from megatron_credit.mcore.policy import Policy  # noqa: E402
from megatron_credit.mcore.progress_board import ProgressBoard  # noqa: E402
from megatron_credit.rollouts.server import end_with_parent  # noqa: E402
from megatron_credit.trainer.config import RunConfig  # noqa: E402
from megatron_credit.trainer.evidence_teacher import teacher_of  # noqa: E402
from megatron_credit.trainer.launched_attempt import (  # noqa: E402
    Failure,
    LaunchedAttempt,
    can_be_tried_again,
    report_uncaught,
)
from megatron_credit.trainer.loop import Rollouts, Trainer  # noqa: E402
from megatron_credit.trainer.recorder import (  # noqa: E402
    RunRecorder,
    SilentRecorder,
    WatchedRecorder,
)
from megatron_credit.trainer.rollout_sources import (  # noqa: E402
    Rank,
    connect,
    engine_rollouts,
    loaded_rollouts,
)
from megatron_credit.trainer.run_directory import RunDirectory, checkpoint_step  # noqa: E402
from megatron_credit.trainer.signals.build import open_credit_stage  # noqa: E402
from megatron_credit.trainer.stopping import NeverStop, StopOnRequest  # noqa: E402
from megatron_credit.trainer.trainer_logs import RANK_STARTS  # noqa: E402
from megatron_credit.trainer.training_policy import TrainingPolicy  # noqa: E402
from megatron_credit.trainer.watchdog import Watchdog, end_process  # noqa: E402
from megatron_credit.trainer.worker_environment import global_rank, meeting_point  # noqa: E402


def main() -> None:
    """Entry point of a rank; raises, and so ends the job, on any failure."""
    arguments = parse_arguments()
    end_with_parent()
    directories = [RunDirectory(path) for path in arguments.directory]
    redirect_output(directories[0].logs / f"trainer-{global_rank()}.log")
    attempt = None if arguments.attempt is None else LaunchedAttempt(arguments.attempt)
    first = read_config(directories[0])
    ranks = join(first)
    watchdog = start_watchdog(first, ranks, attempt)
    if attempt is not None:
        report_uncaught(attempt, lambda error: failure_of_rank(error, watchdog))
    fleet, where = None, arguments.engines or arguments.engine
    for directory in directories:
        config = read_config(directory)
        if directory is not directories[0]:
            ranks = join(config)
        rank = start_rank(config, directory, ranks, arguments.checkpoint)
        if fleet is None and where is not None and rank.is_leader:
            fleet = connect(config, directory, where)
        if arguments.load_rollouts is not None:
            rollouts = loaded_rollouts(rank, arguments.load_rollouts)
        else:
            rollouts = engine_rollouts(rank, fleet)
        is_last = directory is directories[-1]
        if train(rank, rollouts, attempt, watchdog):
            watchdog.enter(config.trainer.steps, "export")
            export_model(config, directory, rank.policy, is_writer=rank.is_leader)
        if is_last:
            watchdog.close()
        stop_parallel(keep_world=not is_last)


def read_config(directory: RunDirectory) -> RunConfig:
    """The resolved configuration that the launcher left there."""
    return RunConfig.model_validate_json(directory.config.read_text())


def join(config: RunConfig) -> Ranks:
    """This process's place in the run's layout."""
    return start_parallel(
        config.parallel, seed=config.run.seed, timeout_s=config.engine.request_timeout_s + 600
    )


def start_watchdog(config: RunConfig, ranks: Ranks, attempt: LaunchedAttempt | None) -> Watchdog:
    """The watchdog of this rank; from now on the ranks know how far each of them is."""
    address, port = meeting_point()
    board = ProgressBoard(rank=ranks.rank, world_size=ranks.world_size, address=address, port=port)

    def on_hang(reason: str, phase: str) -> None:
        if attempt is not None:
            attempt.report(Failure(reason, retry=True, rank=ranks.rank, phase=phase))
        end_process(reason)

    return Watchdog(
        board,
        rank=ranks.rank,
        world_size=ranks.world_size,
        node=os.uname().nodename,
        timeout_s=config.run.hang_timeout_s,
        # The leader waits for engines then, and the others for the leader.
        start_timeout_s=config.run.hang_timeout_s + config.engine.startup_timeout_s,
        on_hang=on_hang,
    )


def failure_of_rank(error: BaseException, watchdog: Watchdog) -> Failure | None:
    """None for an error that only says that another process is gone."""
    if is_lost_peer(error):
        return None
    return Failure(
        f"{type(error).__name__}: {error}",
        retry=can_be_tried_again(error),
        rank=global_rank(),
        phase=watchdog.phase,
    )


def start_rank(
    config: RunConfig, directory: RunDirectory, ranks: Ranks, checkpoint: Path | None
) -> Rank:
    """This process's part of a run, its weights loaded."""
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


def train(
    rank: Rank, rollouts: Rollouts, attempt: LaunchedAttempt | None, watchdog: Watchdog
) -> bool:
    """Puts the parts together and runs the loop; False where it was asked to stop."""
    config, directory, last_step = rank.config, rank.directory, rank.last_step
    recorder = WatchedRecorder(
        RunRecorder(config, directory, last_step=last_step) if rank.is_leader else SilentRecorder(),
        watchdog,
        attempt if rank.is_leader else None,
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
        is_complete = Trainer(
            config=config,
            policy=policy,
            credit=credit,
            rollouts=rollouts,
            recorder=recorder,
            stop=NeverStop()
            if attempt is None
            else StopOnRequest(attempt, is_leader=rank.is_leader),
            last_step=last_step,
        ).run()
    recorder.close()
    return is_complete


def parse_arguments() -> argparse.Namespace:
    """The worker's command line, written by the launcher."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, nargs="+", help="run directories with config.json")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--engine", help="http address of the engine")
    source.add_argument("--engines", type=Path, help="directory in which engines register")
    source.add_argument("--load-rollouts", type=Path, help="directory or file of rollouts")
    parser.add_argument("--checkpoint", type=Path, help="checkpoint directory to go on from")
    parser.add_argument("--attempt", type=Path, help="directory of the attempt of a launched run")
    return parser.parse_args()


def redirect_output(path: Path) -> None:
    """Sends this process's output, that of native code included, to its own log file."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(log, RANK_STARTS.encode())
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())


if __name__ == "__main__":
    main()
