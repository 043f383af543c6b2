"""Plans that cannot work are refused before anything is submitted."""

from __future__ import annotations

import re
from pathlib import Path

from credit_launch.plan import LEADER, ROLLOUT, Plan
from credit_launch.times import in_words, seconds_of

OURS = {
    "nodes": "launch.trainer_nodes, rollout_nodes and spare_nodes",
    "ntasks": "the roles",
    "ntasks-per-node": "the roles",
    "cpus-per-task": "launch.cpus_per_node",
    "gpus-per-node": "launch.gpus_per_node",
    "gres": "launch.gpus_per_node",
    "job-name": "the run directory",
    "time": "launch.time",
    "partition": "launch.partition",
    "account": "launch.account",
    "qos": "launch.qos",
    "constraint": "launch.constraint",
    "exclude": "launch.exclude",
    "reservation": "launch.reservation",
    "signal": "launch.warn_seconds",
    "requeue": "launch.max_attempts",
    "no-requeue": "launch.max_attempts",
    "no-kill": "launch.hot_spares",
    "open-mode": "the launcher",
    "output": "the launcher",
    "error": "the launcher",
    "export": "launch.environment",
    "array": 'launch.layout = "jobs"',
    "dependency": "the launcher",
    "chdir": "the launcher",
    "exclusive": "the launcher",
}
"""Options of sbatch that the plan's own fields set."""
_OPTION = re.compile(r"[a-z][a-z0-9-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NODES = re.compile(r"[A-Za-z0-9_.\[\],-]+")


def check_plan(plan: Plan) -> None:
    """ValueError at the first thing that would fail in the job, with what to do instead."""
    _check_roles(plan)
    _check_time(plan)
    _check_directives(plan)
    _check_container(plan)
    for name, _ in plan.environment:
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"environment: {name!r} is no name of a variable")
    for line in plan.slurm.prologue:
        if "\n" in line:
            raise ValueError(f"prologue: one line of shell each, got {line!r}")


def _check_roles(plan: Plan) -> None:
    if not plan.roles or plan.roles[0].name != LEADER:
        raise ValueError(f"the first role must be {LEADER}, whose end is that of the run")
    for role in plan.roles:
        if role.nodes < 1 or role.replicas < 1:
            raise ValueError(
                f"{role.name}: {role.nodes} nodes x {role.replicas} tasks; a role needs at least "
                "one node"
            )
        if not role.command:
            raise ValueError(f"{role.name} has no command")
        if role.gpus > plan.gpus_per_node:
            raise ValueError(
                f"{role.name} wants {role.gpus} GPUs of a node that has {plan.gpus_per_node}"
            )
    if plan.layout == "jobs":
        if ROLLOUT not in [role.name for role in plan.roles] or plan.role(ROLLOUT).beside:
            raise ValueError(
                'layout = "jobs" puts the engines into jobs of their own, which takes rollout '
                'nodes; set rollout_nodes, or layout = "one"'
            )
    elif plan.layout != "one":
        raise ValueError(f'layout = "{plan.layout}" is neither "one" nor "jobs"')
    if plan.hot_spares and not plan.spare_nodes:
        raise ValueError("hot_spares = true without spare nodes; set spare_nodes to 1 or more")


def _check_time(plan: Plan) -> None:
    limit = seconds_of(plan.slurm.time)
    warn = plan.limits.warn_seconds
    if limit is not None and warn >= limit:
        raise ValueError(
            f"warn_seconds = {warn} is not below the time limit {plan.slurm.time} = {limit} s, so "
            f"the run would be told to stop as soon as it starts; lower it, or raise time above "
            f"{in_words(warn)}"
        )


def _check_directives(plan: Plan) -> None:
    slurm = plan.slurm
    for name, _ in slurm.extra:
        option = name.lstrip("-")
        if option in OURS:
            raise ValueError(f"extra: --{option} follows from {OURS[option]}; leave it out")
        if not _OPTION.fullmatch(name):
            raise ValueError(
                f"extra: {name!r} is no option of sbatch; write the long name without dashes"
            )
    for node in slurm.exclude:
        if not _NODES.fullmatch(node):
            raise ValueError(f"exclude: {node!r} is no name of a node")
    for name, value in directive_texts(plan):
        if any(sign in value for sign in "\n\r\"'\\\0"):
            raise ValueError(
                f"{name} = {value!r}: a line of sbatch cannot hold a quote, a backslash or "
                "a line break; write it without"
            )


def directive_texts(plan: Plan) -> list[tuple[str, str]]:
    """What the user wrote that becomes part of a directive, with its name."""
    slurm = plan.slurm
    named = [
        ("partition", slurm.partition),
        ("account", slurm.account),
        ("qos", slurm.qos),
        ("constraint", slurm.constraint),
        ("reservation", slurm.reservation),
        ("run directory", plan.run),
        ("working directory", plan.workdir),
        ("job name", slurm.job_name),
    ]
    return [*named, *((f"extra.{name}", value) for name, value in slurm.extra)]


def _check_container(plan: Plan) -> None:
    container = plan.container
    if container.kind not in ("none", "pyxis", "apptainer"):
        raise ValueError(f'container.kind = "{container.kind}": none, pyxis or apptainer')
    if container.kind == "none":
        return
    if not container.image:
        raise ValueError(f'container.kind = "{container.kind}" needs container.image')
    # What is written like a file must be one; anything else is for the registry to know.
    looks_like_file = container.image.startswith(("/", "./", "../", "~")) or (
        container.image.endswith((".sqsh", ".sif", ".img"))
    )
    if looks_like_file and not Path(container.image).expanduser().exists():
        raise ValueError(
            f"container.image = {container.image!r}: there is no such file; build or import the "
            "image first, or name one that the registry has"
        )
    for mount in container.mounts:
        source, colon, rest = mount.partition(":")
        if not source or not colon or not rest or any(sign in mount for sign in ",\n"):
            raise ValueError(f"container.mounts: {mount!r} is not of the form HOST:CONTAINER[:ro]")
        if not Path(source).exists():
            raise ValueError(f"container.mounts: {source} does not exist")
