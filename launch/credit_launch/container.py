"""How a task is put into a container: options for srun, or a program in front of its own."""

from __future__ import annotations

from collections.abc import Sequence

from credit_launch.plan import Plan


def srun_options(plan: Plan, variables: Sequence[str]) -> list[str]:
    """Options of srun that put the step into the container; none but for pyxis.

    `variables` are the names of those that must arrive: an image's own values win otherwise.
    """
    if plan.container.kind != "pyxis":
        return []
    mounts = [f"{plan.run}:{plan.run}", *plan.container.mounts]
    return [
        f"--container-image={plan.container.image}",
        f"--container-mounts={','.join(mounts)}",
        f"--container-workdir={plan.run}",
        "--no-container-mount-home",
        *([f"--container-env={','.join(variables)}"] if variables else []),
    ]


def in_container(plan: Plan, command: Sequence[str]) -> list[str]:
    """The command with what puts it into the container in front."""
    if plan.container.kind != "apptainer":
        return list(command)
    mounts = [f"{plan.run}:{plan.run}", *plan.container.mounts]
    binds = [part for mount in mounts for part in ("--bind", mount)]
    gpus = ["--nv"] if plan.gpus_per_node else []
    start = ["apptainer", "exec", *gpus, "--no-home", *binds, "--pwd", plan.run]
    return [*start, plan.container.image, *command]


def for_container(plan: Plan, variables: dict[str, str]) -> dict[str, str]:
    """The variables, and under apptainer also the names by which they win over the image's."""
    if plan.container.kind != "apptainer":
        return variables
    return {**variables, **{f"APPTAINERENV_{name}": value for name, value in variables.items()}}
