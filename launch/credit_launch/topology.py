"""Which task stands on which nodes, and how the tasks find each other."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from credit_launch.files import AttemptFiles, publish
from credit_launch.plan import Plan, Role


@dataclass(frozen=True)
class Node:
    """A machine of the job."""

    name: str
    address: str
    """How other nodes reach it."""
    number: int = 0
    """Its place in the job."""


@dataclass
class Task:
    """Processes that are started together, one on each of their nodes."""

    name: str
    role: Role
    nodes: list[Node]
    port: int = 0
    """Where it serves; 0: it does not."""
    restarts: int = 0


@dataclass
class Topology:
    """All tasks of an attempt and the nodes that are left over."""

    tasks: dict[str, Task]
    spares: list[Node]
    port: int = 0
    """First of the job's ports."""
    lost: set[str] = field(default_factory=set)
    """Names of tasks that will not be started again."""

    def publish(self, plan: Plan, attempt: AttemptFiles, *, job: str | None, engines: Path) -> None:
        """Writes what `trainer/place.py` and others read."""
        tasks = {task.name: _as_json(task) for task in self.tasks.values()}
        record = {
            "run": plan.run,
            "attempt": attempt.number,
            "job": job,
            "local": job is None,
            "port": self.port,
            "engines": str(engines),
            "tasks": tasks,
        }
        publish(attempt.topology, json.dumps(record, indent=1) + "\n")

    def replace_lost(self, task: Task, live: Iterable[str]) -> list[Node] | None:
        """Nodes for the task with spares in place of those that are gone; None without enough."""
        alive = set(live)
        self.spares = [node for node in self.spares if node.name in alive]
        missing = [node for node in task.nodes if node.name not in alive]
        if len(missing) > len(self.spares):
            return None
        return [node if node.name in alive else self.spares.pop(0) for node in task.nodes]


def split_nodes(
    plan: Plan, nodes: Sequence[Node], *, part: str = "", array_task: str = ""
) -> Topology:
    """The nodes dealt to the tasks in the order of the roles; what is left over are spares.

    ValueError where there are too few.
    """
    needed = plan.job_nodes(part) - (0 if part else plan.spare_nodes)
    if len(nodes) < needed:
        raise ValueError(f"{len(nodes)} usable nodes, but the tasks need {needed}")
    rest = list(nodes)
    tasks: dict[str, Task] = {}
    for role in plan.job_roles(part):
        names = [f"{role.name}-{array_task}"] if part else role.task_names()
        for name in names:
            if role.beside:
                own = list(tasks[plan.role(role.beside).task_names()[0]].nodes)[: role.nodes]
            else:
                own, rest = rest[: role.nodes], rest[role.nodes :]
            tasks[name] = Task(name, role, own)
    return Topology(tasks, rest)


def service_variables(topology: Topology) -> dict[str, str]:
    """CREDIT_SERVICE_<NAME> of each role that serves: the address of its first task."""
    found: dict[str, str] = {}
    for task in topology.tasks.values():
        if task.role.serves:
            address = f"http://{task.nodes[0].address}:{task.port}"
            found.setdefault(f"CREDIT_SERVICE_{task.role.name.upper()}", address)
    return found


def _as_json(task: Task) -> dict[str, Any]:
    nodes = [{"name": node.name, "address": node.address} for node in task.nodes]
    port = {"port": task.port} if task.role.serves else {}
    return {"role": task.role.name, "nodes": nodes, **port}
