"""The trainer on one node of a launched run: `python -m megatron_credit.trainer.node`.

The first node checks the run, chooses where it starts and keeps its directory; every node then runs
torchrun with its ranks. The supervisor has put the place of the node into the environment.
"""

import subprocess
import sys
import time
from pathlib import Path

from megatron_credit.memory_kills import RECENT_S, MemoryKills
from megatron_credit.report.curve import draw_curve
from megatron_credit.rollouts.server import end_with_parent
from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.launched_attempt import (
    Failure,
    LaunchedAttempt,
    can_be_tried_again,
    report_uncaught,
)
from megatron_credit.trainer.launched_start import LaunchedStart, begin, read_start
from megatron_credit.trainer.local import describe_exit, start_ranks
from megatron_credit.trainer.metrics import read_metrics
from megatron_credit.trainer.place import Place, read_place
from megatron_credit.trainer.run_directory import RunDirectory
from megatron_credit.trainer.trainer_logs import killed_rank
from megatron_credit.trainer.worker_environment import (
    launch_variables,
    worker_environment,
)

POLL_S = 0.2
CONSEQUENCE_S = 3.0
"""How long a node whose ranks only lost their peers lets the guilty node speak first."""


def main() -> None:
    """Entry point; exits with 0 when the run is complete or was saved because it was asked to."""
    end_with_parent()
    place = read_place(launch_variables())
    attempt = LaunchedAttempt(place.attempt)
    report_uncaught(attempt, failure_here)
    config = RunConfig.model_validate_json((place.run / "launch" / "config.json").read_text())
    directory = RunDirectory(config.run.directory)
    start = begin(config, directory, attempt) if place.leads else read_start(attempt)
    kills = MemoryKills()
    with start:
        code = 0 if start.is_finished else train(config, directory, place, start, kills)
    if code:
        report_ranks(attempt, place, directory, code, kills)
    elif place.leads and not attempt.stopped.exists():
        draw_curve(read_metrics(directory.metrics), directory.curve, title=directory.root.name)
        attempt.write_done()
    sys.exit(1 if code else 0)


def train(
    config: RunConfig,
    directory: RunDirectory,
    place: Place,
    start: LaunchedStart,
    kills: MemoryKills,
) -> int:
    """Runs this node's ranks; torchrun's exit code."""
    torchrun = start_ranks(
        [
            "megatron_credit.trainer.worker",
            str(directory.root),
            *engines_of(config, place),
            *(("--checkpoint", str(start.checkpoint)) if start.checkpoint is not None else ()),
            f"--attempt={place.attempt}",
        ],
        config.launch.trainer_ranks_per_node,
        log=torchrun_log(directory, place),
        environment=worker_environment(),
        meeting=[
            f"--nnodes={len(place.nodes)}",
            f"--node-rank={place.node_rank}",
            # The other rendezvous give the ranks another address and a random port.
            "--rdzv-backend=static",
            f"--master-addr={place.master_address}",
            f"--master-port={place.port}",
        ],
        inherited=[] if start.lock is None else [start.lock],
    )
    while True:
        try:
            return torchrun.wait(RECENT_S)
        except subprocess.TimeoutExpired:
            kills.look()


def engines_of(config: RunConfig, place: Place) -> tuple[str, str]:
    """The worker's option for where the engines are."""
    if config.engine.address is not None:
        return "--engine", config.engine.address
    return "--engines", str(place.engines)


def torchrun_log(directory: RunDirectory, place: Place) -> Path:
    """What torchrun says on this node."""
    return directory.logs / f"torchrun-{place.node_rank}.log"


def report_ranks(
    attempt: LaunchedAttempt, place: Place, directory: RunDirectory, code: int, kills: MemoryKills
) -> None:
    """Says what became of this node's ranks, where nobody said why the attempt ends."""
    log = torchrun_log(directory, place)
    node = place.nodes[place.node_rank]
    killed = killed_rank(log)
    if killed is None or killed.may_be_a_consequence:
        deadline = time.monotonic() + CONSEQUENCE_S
        while not attempt.failure.exists() and time.monotonic() < deadline:
            time.sleep(POLL_S)
    if killed is None:
        reason = f"the trainer on node {node} {describe_exit(code)}: {log} says more"
        attempt.report(Failure(reason, retry=True))
        return
    why = kills.just_now() or f"{log} and the kernel log may say why"
    reason = f"rank {killed.rank} on node {node} {describe_exit(killed.code)}; {why}"
    attempt.report(Failure(reason, retry=True, rank=killed.rank))


def failure_here(error: BaseException) -> Failure:
    """Of an error before or after the ranks ran."""
    return Failure(str(error) or type(error).__name__, retry=can_be_tried_again(error))


if __name__ == "__main__":
    main()
