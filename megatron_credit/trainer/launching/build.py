"""The plan of a configuration."""

import hashlib
import re
import sys
from pathlib import Path
from typing import Any

from credit_launch.plan import LEADER, ROLLOUT, Container, Limits, Plan, Role, Slurm

from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.launch_section import LaunchSection
from megatron_credit.trainer.launching.key import key_file
from megatron_credit.trainer.launching.spread import spread_nodes, with_spread
from megatron_credit.trainer.worker_environment import API_KEY_VARIABLE

SOCKET_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""By which collectives are told the network interface."""


def resolve(config: RunConfig, nodes: int | None = None) -> RunConfig:
    """The configuration as tasks read it, wherever they run: paths are absolute, the trainer's
    processes are those of its nodes. ValueError where these do not fit the model."""
    launch = with_spread(config.launch, spread_nodes(config, nodes))
    tree = with_absolute_paths(config.model_dump())
    tree["launch"] = with_absolute_paths(launch.model_dump())
    tree["run"]["processes"] = launch.num_trainer_ranks
    return RunConfig.model_validate(tree)


def with_absolute_paths(tree: Any) -> Any:
    """The same tree, in which every path is absolute."""
    if isinstance(tree, dict):
        return {name: with_absolute_paths(value) for name, value in tree.items()}
    if isinstance(tree, tuple | list):
        return tuple(map(with_absolute_paths, tree))
    return tree.expanduser().absolute() if isinstance(tree, Path) else tree


def build_plan(config: RunConfig, *, first_attempt: int = 1) -> Plan:
    """The plan of a resolved configuration."""
    launch, run = config.launch, config.run.directory
    own = launch.container.kind == "none"
    python = sys.executable if own else launch.container.python
    return Plan(
        run=str(run),
        roles=roles_of(config, python),
        slurm=slurm_of(launch, run),
        spare_nodes=launch.spare_nodes,
        hot_spares=launch.hot_spares,
        layout=launch.layout,
        gpus_per_node=launch.gpus_per_node,
        cpus_per_node=launch.cpus_per_node,
        container=Container(
            launch.container.kind, launch.container.image or "", launch.container.mounts
        ),
        limits=Limits(
            warn_seconds=launch.warn_seconds,
            max_attempts=launch.max_attempts,
            max_no_progress=launch.max_no_progress,
            preflight_seconds=launch.preflight_seconds,
        ),
        environment=environment_of(launch),
        secrets=str(launch.secrets or ""),
        key_file=str(key_file(run, launch.key_directory)),
        key_variable=API_KEY_VARIABLE,
        base_port=launch.base_port,
        python=sys.executable if own else "python3",
        task_python=python,
        needs_module="megatron_credit",
        preflight=launch.preflight,
        workdir=str(Path.cwd()) if own else "",
        first_attempt=first_attempt,
    )


def roles_of(config: RunConfig, python: str) -> tuple[Role, ...]:
    """Trainer, engines unless they run elsewhere, services."""
    launch = config.launch
    gpus, cpus = launch.gpus_per_node, launch.cpus_per_node
    shares = launch.rollout_nodes == 0 and config.engine.address is None
    training = launch.trainer_ranks_per_node if shares and gpus else gpus
    # With GPUs a shared node is divided, without them both may have all of its cores.
    training_cpus = max(1, cpus * training // gpus) if gpus else cpus
    trainer = Role(
        LEADER,
        (python, "-m", "megatron_credit.trainer.node"),
        nodes=launch.trainer_nodes,
        gpus=training,
        cpus=training_cpus,
    )
    rollout = Role(
        ROLLOUT,
        (python, "-m", "megatron_credit.trainer.engine_node"),
        replicas=max(launch.rollout_nodes, 1),
        gpus=gpus - training if shares else gpus,
        cpus=max(1, cpus - training_cpus) if shares and gpus else cpus,
        beside=LEADER if shares else "",
        max_restarts=launch.max_restarts,
        is_essential=False,
    )
    services = [
        Role(
            service.name,
            service.command,
            replicas=service.nodes,
            gpus=gpus,
            cpus=cpus,
            max_restarts=service.max_restarts,
            serves=True,
        )
        for service in launch.services
    ]
    engines = (rollout,) if config.engine.address is None else ()
    return trainer, *engines, *services


def slurm_of(launch: LaunchSection, run: Path) -> Slurm:
    """What sbatch is asked for."""
    digest = hashlib.sha256(str(run).encode()).hexdigest()[:8]
    return Slurm(
        # Successors wait for jobs of the same name: it must be this run's alone.
        job_name=f"{re.sub(r'[^A-Za-z0-9_.-]', '-', run.name)[:40]}-{digest}",
        time=launch.time,
        partition=launch.partition or "",
        account=launch.account or "",
        qos=launch.qos or "",
        constraint=launch.constraint or "",
        exclude=launch.exclude,
        reservation=launch.reservation or "",
        extra=tuple(launch.extra.items()),
        prologue=launch.prologue,
    )


def environment_of(launch: LaunchSection) -> tuple[tuple[str, str], ...]:
    """Variables of all tasks, those that name the network interface among them."""
    given = launch.environment
    interface = dict.fromkeys(SOCKET_VARIABLES, launch.interface) if launch.interface else {}
    return tuple({**interface, **given}.items())
