"""The running tasks of an attempt: started, watched, started again, ended."""

from __future__ import annotations

import time

from credit_launch.cluster import Running, Step
from credit_launch.failures import end_of_log
from credit_launch.plan import LEADER
from credit_launch.scene import Scene
from credit_launch.topology import Node, Task, Topology, service_variables

POLL_S = 0.2
KILL_WAIT_S = 10.0


class Crew:
    """The tasks of one attempt."""

    def __init__(self, scene: Scene, topology: Topology) -> None:
        self._scene = scene
        self._plan = scene.plan
        self.topology = topology
        self._running: dict[str, Running] = {}

    def start_all(self) -> None:
        """Starts every task; the topology says where each one is."""
        for task in self.topology.tasks.values():
            if task.role.serves:
                task.port = self._scene.cluster.service_port(self.topology.port)
        self._publish()
        for task in self.topology.tasks.values():
            self._start(task)

    def leader_code(self) -> int | None:
        """The trainer's exit code; None while it runs, or where this job has no trainer."""
        if LEADER not in self._running:
            return None
        return self._running[LEADER].poll()

    def replace_ended(self) -> str:
        """Starts tasks again that ended before the trainer; why the attempt fails, or nothing."""
        for name, running in list(self._running.items()):
            code = running.poll()
            if code is None or name == LEADER:
                continue
            del self._running[name]
            why = self._start_again(self.topology.tasks[name], code)
            if why:
                return why
        return ""

    def end_all(self) -> None:
        """Asks all tasks to end, waits for the grace period, then ends them."""
        left = [running for running in self._running.values() if running.poll() is None]
        if left:
            self._scene.cluster.ask_to_end(left)
        left = _wait(left, self._plan.limits.grace_seconds)
        for running in left:
            running.kill()
        _wait(left, KILL_WAIT_S)
        self._running.clear()

    def abandon_all(self) -> None:
        """Leaves all tasks to Slurm, which ends them with the job."""
        for running in self._running.values():
            running.abandon()
        self._running.clear()

    def _start_again(self, task: Task, code: int) -> str:
        say, role = self._scene.journal.say, task.role
        where = ", ".join(node.name for node in task.nodes)
        task.restarts += 1
        say(f"{task.name} on {where} ended with {code} ({task.restarts} of {role.max_restarts})")
        if task.restarts > role.max_restarts:
            return self._give_up(task, f"it ended {task.restarts} times")
        if self._plan.hot_spares:
            nodes = self._nodes_for(task)
            if nodes is None:
                return self._give_up(task, f"{where} is lost and no spare node is left")
            if nodes != task.nodes:
                task.nodes = nodes
                say(f"{task.name} moves to {', '.join(node.name for node in nodes)}")
                self._publish()
        self._start(task)
        return ""

    def _nodes_for(self, task: Task) -> list[Node] | None:
        try:
            live = self._scene.cluster.live_nodes()
        except RuntimeError as error:
            self._scene.journal.say(error)
            return task.nodes
        return self.topology.replace_lost(task, live)

    def _give_up(self, task: Task, why: str) -> str:
        self.topology.lost.add(task.name)
        self._scene.journal.say(f"{task.name} is given up: {why}")
        role = task.role
        others = {name for name, other in self.topology.tasks.items() if other.role == role}
        if not role.is_essential and others - self.topology.lost:
            return ""
        logs = self._scene.attempt.logs
        paths = [logs / f"{task.name}.{node.name}.log" for node in task.nodes]
        return f"{task.name}: {why}; {end_of_log(paths)}"

    def _publish(self) -> None:
        scene = self._scene
        apart = self._plan.layout == "jobs"
        engines = scene.run.root / "engines" if apart else scene.attempt.engines
        engines.mkdir(exist_ok=True)
        self.topology.publish(self._plan, scene.attempt, job=scene.cluster.job, engines=engines)

    def _start(self, task: Task) -> None:
        role, scene = task.role, self._scene
        beside = {other.role.beside for other in self.topology.tasks.values()}
        step = Step(
            name=task.name,
            nodes=task.nodes,
            command=[part.replace("{port}", str(task.port)) for part in role.command]
            if role.serves
            else role.command,
            variables={
                **dict(self._plan.environment),
                **service_variables(self.topology),
                "CREDIT_ATTEMPT": str(scene.attempt.root),
                "CREDIT_TASK": task.name,
                **scene.secrets,
            },
            logs=scene.attempt.logs,
            gpus=role.gpus,
            cpus=role.cpus,
            first_gpu=self._plan.role(role.beside).gpus if role.beside else 0,
            shares=bool(role.beside) or role.name in beside,
        )
        self._running[task.name] = scene.cluster.start(step)


def _wait(running: list[Running], seconds: float) -> list[Running]:
    """Those that still run when all have ended, or after so long."""
    deadline = time.monotonic() + seconds
    while True:
        running = [one for one in running if one.poll() is None]
        if not running or time.monotonic() > deadline:
            return running
        time.sleep(POLL_S / 4)
