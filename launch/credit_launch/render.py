"""The batch script of a plan. No text of the user's reaches the shell unquoted, but for the
prologue, which is shell."""

from __future__ import annotations

import shlex
from pathlib import Path

from credit_launch.files import LaunchFiles
from credit_launch.plan import ROLLOUT, Plan
from credit_launch.validate import check_plan

EPILOGUE = """\
PYTHON={python}
command -v "$PYTHON" > /dev/null || PYTHON=python3
exec "$PYTHON" -u {package} supervise {plan}{part}
"""


def render(plan: Plan, part: str = "") -> str:
    """The sbatch script of the main job or, with `part` "rollout", of the array of engine jobs.

    ValueError where the plan cannot work.
    """
    check_plan(plan)
    files = LaunchFiles(Path(plan.run))
    lines = ["#!/bin/bash"]
    lines += [_directive(name, value) for name, value in directives(plan, part)]
    lines += [
        "",
        "# --export=NONE keeps the login shell's variables out of the job; without the next line",
        "# the steps would have none at all.",
        "export SLURM_EXPORT_ENV=ALL",
        *(f"export {name}={shlex.quote(value)}" for name, value in plan.environment),
        *plan.slurm.prologue,
        "",
    ]
    return "\n".join(lines) + EPILOGUE.format(
        python=shlex.quote(plan.python),
        package=shlex.quote(str(files.package)),
        plan=shlex.quote(str(files.plan)),
        part=f" --part {part}" if part else "",
    )


def directives(plan: Plan, part: str = "") -> list[tuple[str, str]]:
    """Options of sbatch in order; an empty value is an option without one."""
    slurm = plan.slurm
    name = f"{slurm.job_name}-{part}" if part else slurm.job_name
    log = f"{part}-%A_%a.out" if part else "job-%j.out"
    gpus = plan.gpus_per_node
    memory = any(option.startswith("mem") for option, _ in slurm.extra)
    found = [
        ("job-name", name),
        ("nodes", str(plan.job_nodes(part))),
        ("ntasks-per-node", "1"),
        ("cpus-per-task", str(plan.cpus_per_node)),
        ("gpus-per-node", str(gpus) if gpus else None),
        # A job alone on its nodes may have their memory, whatever the partition's default is.
        ("mem", None if memory else "0"),
        ("time", slurm.time),
        ("exclusive", ""),
        ("requeue", ""),
        ("open-mode", "append"),
        # B: or every process of every step would get the signal, which kills most of them.
        ("signal", f"B:USR1@{plan.limits.warn_seconds}"),
        ("output", f"{_pattern(str(LaunchFiles(Path(plan.run)).root))}/{log}"),
        ("chdir", plan.workdir or plan.run),
        ("export", "NONE"),
        ("array", f"0-{plan.role(ROLLOUT).replicas - 1}" if part else None),
        ("partition", slurm.partition or None),
        ("account", slurm.account or None),
        ("qos", slurm.qos or None),
        ("constraint", slurm.constraint or None),
        ("reservation", slurm.reservation or None),
        ("exclude", ",".join(slurm.exclude) or None),
        ("no-kill", "" if plan.hot_spares and not part else None),
        *slurm.extra,
    ]
    return [(option, value) for option, value in found if value is not None]


def _directive(name: str, value: str) -> str:
    if not value:
        return f"#SBATCH --{name}"
    plain = value.isascii() and not set(value) & set(" \t#\\;&|")
    return f"#SBATCH --{name}={value}" if plain else f'#SBATCH --{name}="{value}"'


def _pattern(path: str) -> str:
    """A path in a file name pattern of Slurm, where % and backslash mean something."""
    return path.replace("%", "%%")
