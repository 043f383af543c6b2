"""Commands of the zip file: what the batch script and the steps call."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from credit_launch.endings import FAILED, Ending
from credit_launch.environment import job_variables
from credit_launch.files import LaunchFiles, hold_lock
from credit_launch.journal import Journal
from credit_launch.keeper import keep
from credit_launch.lease import requeue_job, watch
from credit_launch.local import LocalCluster
from credit_launch.plan import Plan, read_plan
from credit_launch.preflight import check_node
from credit_launch.requests import Requests
from credit_launch.slurm import SlurmCluster
from credit_launch.supervisor import Supervisor

BAD_INPUT = 2


def main(arguments: Sequence[str]) -> int:
    """The exit code of one command."""
    # What follows is the task's own command line, options included.
    if arguments[:1] == ["keep"]:
        return keep(arguments[2:], grace_s=float(arguments[1]))
    parser = argparse.ArgumentParser(prog="credit_launch", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    supervise = commands.add_parser("supervise", help="the batch step of a Slurm job")
    supervise.add_argument("plan", type=Path)
    supervise.add_argument("--part", default="", choices=("", "rollout"))
    local = commands.add_parser("local", help="the same on this machine")
    local.add_argument("plan", type=Path)
    check = commands.add_parser("check-node", help="the checks of a node")
    check.add_argument("plan", type=Path)
    check.add_argument("attempt", type=Path)
    lease = commands.add_parser("watch-lease", help="queues a job again that lost its supervisor")
    lease.add_argument("heartbeat", type=Path)
    lease.add_argument("patience", type=float)
    lease.add_argument("job")
    given = parser.parse_args(arguments)
    try:
        return obey(given)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return BAD_INPUT


def obey(given: argparse.Namespace) -> int:
    """The exit code of the command that was given."""
    if given.command == "supervise":
        return supervise_job(read_plan(given.plan), given.part)
    if given.command == "local":
        return supervise_here(read_plan(given.plan))
    if given.command == "check-node":
        return check_node(given.plan, given.attempt)
    watch(given.heartbeat, patience_s=given.patience, requeue=lambda: requeue_job(given.job))
    return 0


def supervise_job(plan: Plan, part: str) -> int:
    """Supervises the Slurm job whose batch step this is; its exit code."""
    variables = job_variables()
    name = f"{part}-{variables.array_task}" if part else ""
    files = LaunchFiles(Path(plan.run), name)
    files.home.mkdir(parents=True, exist_ok=True)
    # Engines run until the trainer has saved: the user's stop is not for them.
    asked = files.home if part else files.root
    requests = Requests(asked / files.stop.name, asked / files.stop_now.name)
    journal = Journal(files.status, variables.job)
    # For `launch`, which looks whether anybody is at work here; the fence of the run is `current`.
    with requests.listening(), hold_lock(files.lock) or contextlib.nullcontext():
        try:
            cluster = SlurmCluster(plan, variables)
            return Supervisor(plan, files, cluster, requests, journal, part=part).run().code
        except (OSError, RuntimeError, ValueError) as error:
            journal.state("gave-up", why=f"{type(error).__name__}: {error}")
            return FAILED


def supervise_here(plan: Plan) -> int:
    """Supervises a run on this machine; its exit code."""
    return run_here(plan).code


def run_here(plan: Plan) -> Ending:
    """As `supervise_here`, with what it ended as. ValueError where another supervisor is at work,
    or the machine has too few GPUs."""
    files = LaunchFiles(Path(plan.run))
    lock = hold_lock(files.lock)
    if lock is None:
        raise ValueError(f"another supervisor is at work in {files.run}; wait for it, or stop it")
    plan = replace(plan, layout="one")  # there are no jobs here
    cluster = LocalCluster(plan, files.package)
    requests = Requests(files.stop, files.stop_now)
    with lock, requests.listening():
        return Supervisor(plan, files, cluster, requests, Journal(files.status, None)).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
