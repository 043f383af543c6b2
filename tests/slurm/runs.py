"""Runs of stand-in tasks on a lab: submit, watch, break, look at what was left."""

import json
import re
import shutil
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from credit_launch.plan import Limits, Plan, Role, Slurm, to_json
from slurm.lab import Lab, wait_for

ROOT = Path(__file__).parents[2]
STAND_IN = Path(__file__).with_name("stand_in.py")
PATIENCE_S = 240
"""For what takes half a minute on a quiet machine."""
FINISHED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")


def stand_in_plan(run: Path, *, trainer_nodes: int = 1, rollouts: int = 1, **options) -> Plan:
    """A plan of stand-in tasks; `options` are those of the trainer's stand-in."""
    words = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    words = [word.replace("_", "-") if word.startswith("--") else word for word in words]
    trainer = Role(
        "trainer", ("python3", str(STAND_IN), "train", *words), nodes=trainer_nodes, gpus=8, cpus=16
    )
    rollout = Role(
        "rollout",
        ("python3", str(STAND_IN), "sample"),
        replicas=max(rollouts, 1),
        gpus=8,
        cpus=16,
        max_restarts=3,
        is_essential=False,
    )
    return Plan(
        run=str(run),
        roles=(trainer, rollout) if rollouts else (trainer,),
        slurm=Slurm(job_name=run.name, time="10:00"),
        gpus_per_node=8,
        cpus_per_node=16,
        limits=Limits(warn_seconds=30, preflight_seconds=20, grace_seconds=3),
    )


@dataclass
class Run:
    """A launched run on a lab."""

    lab: Lab
    root: Path
    job: str = ""

    @property
    def launch(self) -> Path:
        """The launcher's files."""
        return self.root / "launch"

    def submit(self, plan: Plan, **variables: str) -> None:
        """Launch the plan as `megatron-credit launch slurm` does with the real tasks."""
        arguments = [sys.executable, str(Path(__file__).with_name("submit_plan.py"))]
        result = self.lab.finished(*arguments, to_json(plan), **variables)
        assert result.returncode == 0, result.stdout + result.stderr
        self.job = self.json("job.json")["job"]

    def json(self, name: str) -> dict:
        """A JSON file of the launcher's."""
        return json.loads((self.launch / name).read_text())

    def status(self) -> dict:
        """The launcher's own words on the run; empty before it has any."""
        path = self.launch / "status.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def slurm(self, job: str = "") -> dict[str, str]:
        """Slurm's words on the job."""
        line = self.lab.call("scontrol", "show", "job", "-o", job or self.job)
        return dict(re.findall(r"(\w+)=(\S*)", line))

    def attempts(self) -> list[Path]:
        """Directories of the attempts."""
        return sorted(self.launch.glob("attempt-*"))

    def topology(self, attempt: int = 1) -> dict[str, list[str]]:
        """Names of the nodes of each task."""
        tasks = self.json(f"attempt-{attempt:03d}/topology.json")["tasks"]
        return {name: [node["name"] for node in task["nodes"]] for name, task in tasks.items()}

    def lines(self, name: str) -> list[dict]:
        """Records that tasks wrote."""
        path = self.root / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def steps(self, attempt: int | None = None) -> list[int]:
        """Steps in the order in which they were done."""
        rows = self.lines("steps.jsonl")
        return [row["step"] for row in rows if attempt in (None, row["attempt"])]

    def steps_repeated(self) -> int:
        """How often a step was done that had been done."""
        return sum(Counter(self.steps()).values()) - len(set(self.steps()))

    def wait(self, condition, what: str, limit_s: float = PATIENCE_S):
        """Wait for it; the error says how the run stands."""

        def found():
            assert self.lab.is_open, f"the lab was stopped before: {what}"
            return condition()

        try:
            return wait_for(found, what, limit_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story()}") from None

    def wait_steps(self, count: int, attempt: int | None = None) -> None:
        """Wait until so many steps were done."""
        self.wait(lambda: len(self.steps(attempt)) >= count, f"{count} steps of {attempt}")

    def wait_state(self, state: str, limit_s: float = PATIENCE_S) -> None:
        """Wait for a state in the launcher's words."""
        self.wait(lambda: self.status().get("state") == state, f"state {state}", limit_s)

    def wait_finished(self, job: str = "", limit_s: float = PATIENCE_S) -> str:
        """Slurm's last word on the job."""
        return self.wait(
            lambda: next((s for s in FINISHED if s == self.slurm(job)["JobState"]), None),
            "the end of the job",
            limit_s,
        )

    def processes(self, *nodes: str) -> list[str]:
        """Command lines of this run's processes on these nodes."""
        mentions = str(self.root)
        return [line for node in nodes for line in self.lab.processes(node, mentions)]

    def log(self, task: str, node: str, attempt: int = 1) -> str:
        """What a task wrote."""
        return (self.launch / f"attempt-{attempt:03d}/logs/{task}.{node}.log").read_text()

    def story(self) -> str:
        """All that says how the run went."""
        parts = [json.dumps(self.status()), str(self.steps())]
        if self.job:
            parts.append(self.lab.call("scontrol", "show", "job", "-o", self.job, check=False))
        logs = [*self.launch.glob("*.out"), *self.launch.glob("attempt-*/logs/*")]
        parts += [f"--- {path}\n{path.read_text(errors='replace')[-3000:]}" for path in logs]
        return "\n".join(parts)


def new_run(lab: Lab, name: str) -> Run:
    """A run directory of its own; the name is that of the job too."""
    root = lab.site.home / "runs" / name
    root.mkdir(parents=True)
    for path in (root.parent, root):
        shutil.chown(path, lab.site.user, lab.site.user)
    return Run(lab, root)


def started_run(lab: Lab, name: str, plan_of=stand_in_plan, **options) -> Run:
    """A run of stand-ins that was submitted."""
    run = new_run(lab, name)
    run.submit(plan_of(run.root, **options))
    return run


@dataclass
class Clock:
    """Seconds since a fault."""

    start: float

    @classmethod
    def started(cls) -> "Clock":
        """From now on."""
        return cls(time.time())

    def now(self) -> float:
        """Seconds until now."""
        return time.time() - self.start

    def until(self, moment: float) -> float:
        """Seconds until a moment in time.time()."""
        return moment - self.start
