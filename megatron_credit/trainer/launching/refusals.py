"""What is refused before anything is submitted or started."""

import re
from pathlib import Path

from credit_launch.files import LaunchFiles, is_locked
from credit_launch.plan import Plan
from credit_launch.private import read_secrets
from credit_launch.validate import check_plan

from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.launching import site

NOT_SHARED = ("/tmp", "/var/tmp", "/dev/shm", "/run")
LOCAL_FILE_SYSTEMS = ("tmpfs", "ramfs", "devtmpfs")
SECRET_NAME = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|(API|ACCESS|SECRET|PRIVATE)_?KEY)($|_)"
)


def check_launch(config: RunConfig, plan: Plan, *, on_slurm: bool) -> None:
    """ValueError at the first thing that would fail, or that another run would suffer from."""
    check_plan(plan)
    check_secrets(config)
    check_alone(LaunchFiles(Path(plan.run)))
    if on_slurm:
        check_shared(Path(plan.run))
        if site.has_slurm():
            check_gpus(plan)


def check_gpus(plan: Plan) -> None:
    """ValueError where no node of the site has so many GPUs."""
    most = site.gpus_of_a_node(plan.slurm.partition)
    if most is not None and plan.gpus_per_node > most:
        where = f"partition {plan.slurm.partition}" if plan.slurm.partition else "this site"
        raise ValueError(
            f"launch.gpus_per_node={plan.gpus_per_node}, but nodes of {where} have at most {most} "
            "(sinfo -o %G); lower it or name another launch.partition"
        )


def check_secrets(config: RunConfig) -> None:
    """ValueError where secrets would lie open, or in the run directory."""
    launch, run = config.launch, config.run.directory
    for name in launch.environment:
        if SECRET_NAME.search(name):
            raise ValueError(
                f"launch.environment.{name} looks like a secret, and the run directory shows it; "
                f"write {name}=... into a file that only you may read and name it in "
                "launch.secrets"
            )
    for name, path in (("secrets", launch.secrets), ("key_directory", launch.key_directory)):
        if path is not None and run in (path, *path.parents):
            raise ValueError(f"launch.{name}={path} is in the run directory; keep it elsewhere")
    if launch.secrets is not None:
        read_secrets(launch.secrets)


def check_shared(run: Path) -> None:
    """ValueError where the run directory is known to be this machine's alone; the checks on the
    nodes find the rest."""
    resolved = run.resolve()
    for place in map(Path, NOT_SHARED):
        if place in resolved.parents:
            raise ValueError(
                f"run.directory={run} is in {place}, which every node has for itself; name a "
                "directory on a file system that all nodes share"
            )
    kind = file_system(resolved)
    if kind in LOCAL_FILE_SYSTEMS:
        raise ValueError(
            f"run.directory={run} is on a {kind}, which is this machine's memory; name a directory "
            "on a file system that all nodes share"
        )


def file_system(path: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """The type of the file system that the path is on, or would be; empty where unknown."""
    try:
        lines = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return ""
    points = {Path(fields[1].replace(r"\040", " ")): fields[2] for fields in lines}
    return next((points[place] for place in (path, *path.parents) if place in points), "")


def check_alone(files: LaunchFiles) -> None:
    """ValueError where the run is alive."""
    for job in files.jobs() if site.has_slurm() else []:
        state = site.job_state(job)
        if state:
            raise ValueError(
                f"{files.run} is a run of job {job}, which is {state}; wait for it, or "
                f"`megatron-credit stop {files.run}`"
            )
    for lock in (files.lock, files.run / "lock"):
        if is_locked(lock):
            raise ValueError(
                f"a process is at work in {files.run} ({lock.name} is held); wait for it, or "
                f"`megatron-credit stop {files.run}`"
            )
