"""Runs a job on this machine: an engine and the trainer ranks as child processes, watched."""

import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from megatron_credit.errors import FailedProcess
from megatron_credit.memory_kills import MemoryKills
from megatron_credit.report.curve import draw_curve
from megatron_credit.rollouts.errors import EngineError
from megatron_credit.rollouts.server import EngineServer, end_with_parent
from megatron_credit.trainer.checks import CheckedRun, check_run
from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.follow import follow
from megatron_credit.trainer.loaded_run import check_loaded_run, check_record, notes
from megatron_credit.trainer.metrics import read_metrics
from megatron_credit.trainer.rollout_meta import (
    EACH_STEPS_OWN,
    RolloutMeta,
    describe_sampling,
    read_meta,
    write_meta,
)
from megatron_credit.trainer.run_directory import RunDirectory
from megatron_credit.trainer.start import find_start, prepare
from megatron_credit.trainer.trainer_logs import KilledRank, killed_rank, newest_text
from megatron_credit.trainer.worker_environment import API_KEY_VARIABLE, worker_environment

STOP_TIMEOUT_S = 15.0
LOG_LINES = 25


class TrainerError(FailedProcess):
    """The trainer ranks ended without finishing the run."""


def run_locally(
    config: RunConfig, console: Console, *, record: Path | None = None
) -> RunDirectory:
    """Trains to the last step and draws the curve; the run directory holds everything.

    With a `record` of rollouts, a directory or a file, the run trains on them and has no engine.
    Raises ValueError, before anything is started, for what the user can correct, EngineError and
    TrainerError for processes that died, with the end of their logs.
    """
    checked = check_run(config) if record is None else check_loaded_run(config, record)
    remarks = checked.remarks if record is None else notes(config, record)
    config = checked.config
    directory = RunDirectory(config.run.directory)
    with ExitStack() as stack:
        start = find_start(config, directory, questions=checked.questions)
        if record is not None:
            check_record(config, record, first=start.last_step + 1)
        lock = stack.enter_context(prepare(config, directory, start))
        directory.write_data(checked.questions)
        sampling = sampling_of(config, checked, record)
        if sampling is not None:
            write_meta(directory.rollouts, sampling)
        for remark in start.remarks:
            console.print(remark, markup=False)
        if start.checkpoint is not None:
            console.print(f"going on from {start.checkpoint}", markup=False)
            if start.last_step == config.trainer.steps and directory.model.is_dir():
                return directory
        for remark in remarks:
            console.print(remark, markup=False)
        server = start_engine(config, directory) if record is None else None
        stack.callback(stop_engine, server)
        trainer = start_trainer(
            config,
            [directory],
            start.checkpoint,
            rollouts_from(config, server, record),
            server=server,
            inherited=[lock.fileno()],
        )
        stack.callback(stop_process, trainer)
        follow(directory, console, watcher(trainer, server, directory, config.num_processes))
    draw_curve(read_metrics(directory.metrics), directory.curve, title=directory.root.name)
    return directory


def rollouts_from(
    config: RunConfig, server: EngineServer | None, record: Path | None
) -> tuple[str, str]:
    """The worker's option for a record of rollouts, for our engine or for the one configured."""
    if record is not None:
        return "--load-rollouts", str(record.absolute())
    address = server.address if server is not None else config.engine.address
    assert address is not None
    return "--engine", address


def sampling_of(config: RunConfig, checked: CheckedRun, record: Path | None) -> RolloutMeta | None:
    """How the rollouts of this run are sampled; None where a record does not say how its were."""
    if record is not None:
        return read_meta(record)
    questions = checked.questions["fingerprint"]
    return describe_sampling(config, questions=questions, weights=EACH_STEPS_OWN)


def start_engine(config: RunConfig, directory: RunDirectory) -> EngineServer | None:
    """Our engine, still loading; None where the configuration names one that runs already."""
    if config.engine.address is not None:
        return None
    return EngineServer.start(
        config.policy.model,
        config.engine,
        log_path=directory.logs / "engine.log",
        seed=config.run.seed,
        routed_experts=config.policy.router_replay,
    )


def stop_engine(server: EngineServer | None) -> None:
    """Ends our engine; one that was attached to stays."""
    if server is not None:
        server.stop()


def start_trainer(
    config: RunConfig,
    directories: Sequence[RunDirectory],
    checkpoint: Path | None,
    source: Sequence[str],
    *,
    server: EngineServer | None,
    inherited: Sequence[int],
) -> subprocess.Popen:
    """torchrun with one worker a rank, for one run or several in turn; its descendants keep the
    runs' locks open.

    `source` is the worker's option that says where rollouts come from.
    """
    command = [
        "megatron_credit.trainer.worker",
        *(str(directory.root) for directory in directories),
        *source,
        *(("--checkpoint", str(checkpoint)) if checkpoint is not None else ()),
    ]
    environment = worker_environment()
    if server is not None:
        environment[API_KEY_VARIABLE] = server.api_key
    return start_ranks(
        command,
        config.num_processes,
        log=directories[0].logs / "torchrun.log",
        environment=environment,
        inherited=inherited,
    )


def start_ranks(
    command: Sequence[str],
    num_ranks: int,
    *,
    log: Path,
    environment: Mapping[str, str],
    meeting: Sequence[str] = ("--standalone",),
    inherited: Sequence[int] = (),
) -> subprocess.Popen:
    """torchrun with so many ranks here of this module and its arguments, its own words in a log.

    `meeting`: torchrun's options for how the nodes meet.
    """
    with log.open("w") as stream:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", *meeting),
                *(f"--nproc-per-node={num_ranks}", "-m", *command),
            ],
            env=environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            pass_fds=inherited,
            preexec_fn=end_with_parent,
        )


def watcher(
    trainer: subprocess.Popen,
    server: EngineServer | None,
    directory: RunDirectory,
    num_ranks: int,
) -> Callable[[], bool]:
    """A function that says whether the run goes on and raises when one of its processes failed."""

    kills = MemoryKills()

    def goes_on() -> bool:
        kills.look()
        code = trainer.poll()
        if code == 0:
            return False
        if server is not None:
            check_engine(server, started=directory.status.exists())
        if code is not None:
            killed = kills.just_now()
            raise TrainerError(
                f"{describe_end(directory, code)}{killed and f'; {killed}'}\n"
                f"{failed_log(directory, num_ranks)}"
            )
        return True

    return goes_on


def check_engine(server: EngineServer, *, started: bool) -> None:
    """Raises EngineError where the engine died, ValueError where it never began to serve."""
    try:
        server.check_alive()
    except EngineError as error:
        if started:
            raise
        raise ValueError(f"the engine cannot start: {error}") from None


def describe_end(directory: RunDirectory, code: int) -> str:
    """What became of the trainer, whose torchrun ended with this exit code."""
    killed = guilty_rank(directory)
    if killed is None:
        return f"the trainer {describe_exit(code)}"
    return f"rank {killed.rank} of the trainer {describe_exit(killed.code)}"


def guilty_rank(directory: RunDirectory) -> KilledRank | None:
    """The rank that a signal ended, and not for having lost another."""
    killed = killed_rank(directory.logs / "torchrun.log")
    return None if killed is None or killed.may_be_a_consequence else killed


def failed_log(directory: RunDirectory, num_ranks: int) -> str:
    """The end of the log where the failure most likely stands: that of the first rank with a
    traceback, else torchrun's, which says what became of each rank."""
    killed = guilty_rank(directory)
    ranks = range(num_ranks) if killed is None else [killed.rank]
    logs = [directory.logs / f"trainer-{rank}.log" for rank in ranks]
    guilty = [path for path in logs if "Traceback" in newest_text(path)]
    path = guilty[0] if guilty else directory.logs / "torchrun.log"
    lines = newest_text(path).splitlines()[-LOG_LINES:]
    return "\n".join([f"the end of {path}:", *(f"  {line}" for line in lines)])


def describe_exit(code: int) -> str:
    """What an exit code means, in words."""
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def stop_process(process: subprocess.Popen) -> None:
    """Ends torchrun, which ends its workers; a second, harder try after a bound."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
