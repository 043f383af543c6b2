"""What the supervisor needs of a machine or a cluster: nodes, and steps that run on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from credit_launch.topology import Node


@dataclass(frozen=True)
class Step:
    """A command that runs once on each of some nodes."""

    name: str
    nodes: Sequence[Node]
    command: Sequence[str]
    variables: Mapping[str, str]
    """Added to the environment; may be secret."""
    logs: Path
    """Directory of NAME.NODE.log."""
    gpus: int = 0
    """Of each node."""
    cpus: int = 1
    first_gpu: int = 0
    """Where its GPUs begin on a node that it shares."""
    shares: bool = False
    """Others have the node's other GPUs at the same time."""
    ends_together: bool = True
    """When it fails on one node, it is ended on the others."""
    one_log: bool = False
    """Into NAME.log, written where the supervisor runs: for steps that find bad nodes."""
    outside_container: bool = False
    """On the node itself."""


class Running(Protocol):
    """A step that was started."""

    def poll(self) -> int | None:
        """None while it runs; its exit code, which says nothing about success under Slurm."""
        ...

    def kill(self) -> None:
        """Ends its processes."""
        ...

    def abandon(self) -> None:
        """Leaves its processes to whoever ends the job; nobody is told anything."""
        ...


class Cluster(Protocol):
    """Where an attempt runs."""

    job: str | None
    """Slurm's number of the job; None on this machine."""
    array_task: str
    """Number in a job array; empty outside of one."""

    def nodes(self) -> list[Node]:
        """All nodes, in order."""
        ...

    def live_nodes(self) -> list[str]:
        """Names of the nodes that the job still has."""
        ...

    def first_port(self, base: int) -> int:
        """First of 16 ports that are the job's."""
        ...

    def service_port(self, first_port: int) -> int:
        """A port for a service on a node of its own."""
        ...

    def seconds_left(self) -> float | None:
        """Until the time limit; None where there is none or nobody knows."""
        ...

    def is_ending(self) -> bool:
        """Whether the job is being ended from outside."""
        ...

    def start(self, step: Step) -> Running:
        """Starts the step and returns at once."""
        ...

    def ask_to_end(self, running: Sequence[Running]) -> None:
        """Sends SIGTERM to the processes of these steps and returns at once."""
        ...

    def requeue(self) -> str:
        """Asks for another attempt of this job; empty, or why that was refused."""
        ...

    def submit_successor(self, script: Path, exclude: Sequence[str]) -> str:
        """Submits the job anew without these nodes, to start when this one has ended; its
        number."""
        ...

    def cancel(self, job: str) -> None:
        """Ends another job of ours."""
        ...
