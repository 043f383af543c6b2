"""Environment variables; the launcher's one place that reads any."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

_KEPT = ("SLURM_CONF", "SLURM_JWT")
"""What Slurm's commands need to reach the cluster at all."""


@dataclass(frozen=True)
class JobVariables:
    """What Slurm says about the job whose batch step this is."""

    job: str
    nodelist: str
    array_task: str
    """Number in a job array; empty outside of one."""


def job_variables(environment: Mapping[str, str] = os.environ) -> JobVariables:
    """The job's variables; ValueError outside of a job."""
    try:
        return JobVariables(
            environment["SLURM_JOB_ID"],
            environment["SLURM_JOB_NODELIST"],
            environment.get("SLURM_ARRAY_TASK_ID", ""),
        )
    except KeyError as error:
        raise ValueError(
            f"{error.args[0]} is not set: this program is the batch step of a Slurm job, which "
            "`megatron-credit launch slurm` submits"
        ) from None


def node_name(environment: Mapping[str, str] = os.environ) -> str:
    """This node, as its job calls it."""
    return environment.get("CREDIT_NODE") or environment["SLURMD_NODENAME"]


def inherited(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Our environment, for tasks."""
    return dict(environment)


def for_submission(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Our environment without what would change an sbatch behind the script's back: variables of
    sbatch, and of the job that the command may be typed in."""
    return {
        name: value
        for name, value in environment.items()
        if name in _KEPT or not name.startswith(("SBATCH_", "SLURM_", "SLURMD_"))
    }


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[str] | None:
    """GPUs that this process may use by its environment; None: no limit."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return None if visible is None else [part for part in visible.split(",") if part.strip()]
