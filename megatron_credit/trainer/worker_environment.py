"""Environment variables of the trainer ranks; the trainer's one place that reads or sets any."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

API_KEY_VARIABLE = "MEGATRON_CREDIT_ENGINE_KEY"
"""The engine's key travels in the environment: command lines and run directories are readable."""

DEFAULTS = {
    # OpenMP's spin barriers cost more than they give when ranks share cores.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
}


def worker_environment() -> dict[str, str]:
    """The environment for the trainer ranks: ours, with defaults where ours says nothing."""
    return {**DEFAULTS, **os.environ}


def engine_key(environment: Mapping[str, str] = os.environ) -> str | None:
    """The key of the engine's control endpoints, if it has one."""
    return environment.get(API_KEY_VARIABLE)


def visible_devices(environment: Mapping[str, str] = os.environ) -> list[str] | None:
    """The CUDA devices that this process may use; None: nobody says."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    return None if named is None else [one for one in named.split(",") if one]


def global_rank(environment: Mapping[str, str] = os.environ) -> int:
    """This process's rank, as torchrun numbers it."""
    return int(environment["RANK"])


def meeting_point(environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Address and port of the store at which torchrun's ranks meet."""
    return environment["MASTER_ADDR"], int(environment["MASTER_PORT"])


@dataclass(frozen=True)
class LaunchVariables:
    """What the supervisor of a launched run puts into the environment of a task."""

    attempt: Path
    """The attempt's directory."""
    task: str
    """The task's name."""
    node: str
    """The name of this node."""


def launch_variables(environment: Mapping[str, str] = os.environ) -> LaunchVariables:
    """The variables of a launched task. ValueError outside of one."""
    try:
        attempt, task = environment["CREDIT_ATTEMPT"], environment["CREDIT_TASK"]
        # A step over several nodes has one environment; Slurm alone knows which node this is.
        node = environment.get("CREDIT_NODE") or environment["SLURMD_NODENAME"]
    except KeyError as error:
        raise ValueError(
            f"the variable {error.args[0]} is not set: this program is a task of "
            "`megatron-credit launch` and is not started by hand"
        ) from None
    return LaunchVariables(Path(attempt), task, node)
