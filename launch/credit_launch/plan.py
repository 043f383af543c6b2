"""What is started where: the plan of a launched run, as `plan.json` holds it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LEADER = "trainer"
"""The role whose task is the run: an attempt ends with it."""
ROLLOUT = "rollout"
"""The role that layout `jobs` puts into jobs of its own."""


@dataclass(frozen=True)
class Role:
    """Tasks of one kind."""

    name: str
    command: tuple[str, ...]
    """Program and arguments, one process a node; `{port}` is replaced where `serves`."""
    nodes: int = 1
    """Of each task."""
    replicas: int = 1
    """Tasks: `rollout-0`, `rollout-1`; the leader has one and no number."""
    gpus: int = 0
    """Of each of its nodes."""
    cpus: int = 1
    """Of each of its nodes."""
    beside: str = ""
    """The role whose nodes it shares; empty: it has nodes of its own."""
    max_restarts: int = 0
    """How often each task is started again in an attempt."""
    is_essential: bool = True
    """The attempt fails with any of its tasks; else, with the last of them."""
    serves: bool = False
    """Its tasks listen on a port, which the others find in CREDIT_SERVICE_<NAME>."""

    def task_names(self) -> list[str]:
        """Names of its tasks."""
        if self.name == LEADER:
            return [LEADER]
        return [f"{self.name}-{number}" for number in range(self.replicas)]


@dataclass(frozen=True)
class Container:
    """What tasks run in; the supervisor runs outside."""

    kind: str = "none"
    """none, pyxis or apptainer."""
    image: str = ""
    mounts: tuple[str, ...] = ()
    """HOST:CONTAINER[:ro], besides the run directory."""


@dataclass(frozen=True)
class Slurm:
    """What sbatch is asked for."""

    job_name: str
    time: str = "24:00:00"
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    exclude: tuple[str, ...] = ()
    reservation: str = ""
    extra: tuple[tuple[str, str], ...] = ()
    """Further options without dashes; an empty value is an option without one."""
    prologue: tuple[str, ...] = ()
    """Lines of shell that the batch script runs first."""


@dataclass(frozen=True)
class Limits:
    """When something is ended, and how often it is tried."""

    warn_seconds: int = 300
    """Before the time limit: save and queue again."""
    max_attempts: int = 50
    max_no_progress: int = 2
    """Failed attempts in a row without a new checkpoint."""
    preflight_seconds: int = 120
    grace_seconds: int = 20
    """Between asking a task to end and ending it."""
    lease_seconds: int = 60
    """With hot spares: silence of the supervisor after which the nodes queue the job again."""


@dataclass(frozen=True)
class Plan:
    """A run over nodes."""

    run: str
    """The run directory, absolute, which all nodes share."""
    roles: tuple[Role, ...]
    """The leader comes first."""
    slurm: Slurm
    spare_nodes: int = 0
    hot_spares: bool = False
    """Keep the allocation when a node is lost, and go on with a spare."""
    layout: str = "one"
    """one: one allocation; jobs: the rollout role is an array of jobs."""
    gpus_per_node: int = 0
    cpus_per_node: int = 1
    container: Container = Container()
    limits: Limits = Limits()
    environment: tuple[tuple[str, str], ...] = ()
    """Of all tasks; not secret."""
    secrets: str = ""
    """File of NAME=VALUE lines, read when the supervisor starts; empty: none."""
    key_file: str = ""
    """File of the engines' key, read when the supervisor starts; empty: none."""
    key_variable: str = ""
    """The variable in which tasks get the key."""
    base_port: int = 10000
    python: str = "python3"
    """Interpreter of the supervisor, on the nodes."""
    task_python: str = "python3"
    """Interpreter of our checks of a node, where tasks run."""
    needs_module: str = ""
    """Package that `task_python` must be able to import; empty: none."""
    preflight: tuple[str, ...] = ()
    """The user's check of a node."""
    workdir: str = ""
    """Where tasks run; empty: the run directory."""
    first_attempt: int = 1
    """Attempts before this one were those of an earlier launch and do not count."""

    def role(self, name: str) -> Role:
        """The role of this name."""
        return next(role for role in self.roles if role.name == name)

    def job_roles(self, part: str = "") -> tuple[Role, ...]:
        """Roles of the main job, or of one job of the rollout array."""
        if self.layout == "one":
            return self.roles
        return tuple(role for role in self.roles if (role.name == ROLLOUT) == bool(part))

    def job_nodes(self, part: str = "") -> int:
        """Nodes of the main job, spares included, or of one job of the rollout array."""
        if part:
            return self.role(part).nodes
        own = [role for role in self.job_roles() if not role.beside]
        return sum(role.nodes * role.replicas for role in own) + self.spare_nodes

    @property
    def total_nodes(self) -> int:
        """Nodes of all jobs."""
        apart = self.role(ROLLOUT) if self.layout == "jobs" else None
        return self.job_nodes() + (apart.nodes * apart.replicas if apart else 0)


def to_json(plan: Plan) -> str:
    """The text of plan.json."""
    return json.dumps(asdict(plan), indent=1) + "\n"


def from_json(text: str) -> Plan:
    """The plan of this text; TypeError or KeyError where another version wrote it."""
    tree: dict[str, Any] = json.loads(text)
    slurm, container = tree["slurm"], tree["container"]
    slurm["exclude"], slurm["prologue"] = tuple(slurm["exclude"]), tuple(slurm["prologue"])
    slurm["extra"] = tuple((name, value) for name, value in slurm["extra"])
    container["mounts"] = tuple(container["mounts"])
    tree["slurm"], tree["container"] = Slurm(**slurm), Container(**container)
    tree["limits"] = Limits(**tree["limits"])
    for role in tree["roles"]:
        role["command"] = tuple(role["command"])
    tree["roles"] = tuple(Role(**role) for role in tree["roles"])
    tree["environment"] = tuple((name, value) for name, value in tree["environment"])
    tree["preflight"] = tuple(tree["preflight"])
    return Plan(**tree)


def read_plan(path: Path) -> Plan:
    """The plan of a file."""
    return from_json(path.read_text())
