"""Nodes simulated on this machine; steps are processes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from credit_launch.cluster import Running, Step
from credit_launch.environment import inherited, visible_gpus
from credit_launch.plan import Plan
from credit_launch.ports import ephemeral_floor, free_block, free_ports
from credit_launch.topology import Node

STRAGGLERS_S = 30.0
"""How long processes of a step may outlive the first that ended well."""


class LocalCluster:
    """So many nodes, all of them this machine; its GPUs are dealt out."""

    array_task = ""
    job: str | None = None

    def __init__(self, plan: Plan, package: Path) -> None:
        self._plan = plan
        self._package = package
        self._gpus = machine_gpus() if plan.gpus_per_node else []
        needed = plan.gpus_per_node * plan.total_nodes
        if len(self._gpus) < needed:
            raise ValueError(
                f"{plan.total_nodes} nodes with {plan.gpus_per_node} GPUs each need {needed}, this "
                f"machine has {len(self._gpus)}; lower launch.gpus_per_node or the nodes"
            )

    def nodes(self) -> list[Node]:
        """local0, local1, ..."""
        return [
            Node(f"local{number}", "127.0.0.1", number) for number in range(self._plan.total_nodes)
        ]

    def live_nodes(self) -> list[str]:
        """All of them."""
        return [node.name for node in self.nodes()]

    def first_port(self, base: int) -> int:
        """Of 16 that nobody listens on."""
        return free_block(base, ephemeral_floor())

    def service_port(self, first_port: int) -> int:
        """Any free one: all nodes share this machine's ports."""
        return free_ports(1)[0]

    def seconds_left(self) -> float | None:
        """There is no limit."""
        return None

    def is_ending(self) -> bool:
        """A signal would say so."""
        return False

    def start(self, step: Step) -> Running:
        """A process for each node, each below a keeper of its own."""
        return LocalStep([self._start_on(node, step) for node in step.nodes], step.ends_together)

    def ask_to_end(self, running: Sequence[Running]) -> None:
        """Through their keepers."""
        for step in running:
            assert isinstance(step, LocalStep)
            step.terminate()

    def requeue(self) -> str:
        """The caller makes the next attempt itself."""
        return ""

    def submit_successor(self, script: Path, exclude: Sequence[str]) -> str:
        """There are no other nodes."""
        raise AssertionError("a machine has no other nodes")

    def cancel(self, job: str) -> None:
        """There are no other jobs."""

    def _start_on(self, node: Node, step: Step) -> subprocess.Popen:
        variables = {**inherited(), **step.variables, "CREDIT_NODE": node.name}
        if self._plan.gpus_per_node:
            first = node.number * self._plan.gpus_per_node + step.first_gpu
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus[first : first + step.gpus])
        name = f"{step.name}.log" if step.one_log else f"{step.name}.{node.name}.log"
        grace = str(self._plan.limits.grace_seconds)
        with (step.logs / name).open("a") as log:
            return subprocess.Popen(
                [sys.executable, str(self._package), "keep", grace, *step.command],
                env=variables,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self._plan.workdir or self._plan.run,
            )


class LocalStep:
    """Processes of one step, which behave as those of an srun."""

    def __init__(self, processes: Sequence[subprocess.Popen], ends_together: bool) -> None:
        self._processes = processes
        self._ends_together = ends_together
        self._first_end: float | None = None
        self._is_told = False

    def poll(self) -> int | None:
        """The largest exit code once all have ended."""
        codes = [process.poll() for process in self._processes]
        ended = [code for code in codes if code is not None]
        if len(ended) == len(codes):
            return max((abs(code) for code in ended), default=0)
        if ended and self._ends_together and not self._is_told:
            self._first_end = self._first_end or time.monotonic()
            if any(ended) or time.monotonic() > self._first_end + STRAGGLERS_S:
                self.terminate()
        return None

    def terminate(self) -> None:
        """Asks the keepers, which ask the processes."""
        self._is_told = True
        for process in self._processes:
            if process.poll() is None:
                process.terminate()

    def abandon(self) -> None:
        """As `kill`: nobody else would end them."""
        self.kill()

    def kill(self) -> None:
        """Closes the pipes too, so that a keeper ends what is below it."""
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
            if process.stdin is not None:
                process.stdin.close()


def machine_gpus() -> list[str]:
    """Names under which CUDA knows this machine's GPUs, those that we may see."""
    visible = visible_gpus()
    if visible is not None:
        return visible
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    return [str(number) for number in range(count)]
