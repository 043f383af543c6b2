"""The nodes of a Slurm job; steps are sruns."""

from __future__ import annotations

import datetime
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from credit_launch.cluster import Running, Step
from credit_launch.container import for_container, in_container, srun_options
from credit_launch.environment import JobVariables, for_submission, inherited
from credit_launch.plan import Plan
from credit_launch.ports import SERVICE_OFFSET, ephemeral_floor, job_port
from credit_launch.topology import Node

PATIENCE_S = 300.0
"""How long Slurm's controller may be away: it is restarted now and then."""
ANSWER_S = 60.0
RETRY_S = 5.0
AWAY = ("Socket timed out", "Unable to contact slurm controller", "Connection refused")
"""In what Slurm's commands say when the controller does not answer."""


class SlurmCluster:
    """The allocation of the job whose batch step this is."""

    def __init__(self, plan: Plan, variables: JobVariables) -> None:
        self._plan = plan
        self._variables = variables
        self.job: str | None = variables.job
        self.array_task = variables.array_task

    def nodes(self) -> list[Node]:
        """All nodes, in Slurm's order."""
        names = expand(self._variables.nodelist)
        return [Node(name, name, number) for number, name in enumerate(names)]

    def live_nodes(self) -> list[str]:
        """Names of the nodes that are still the job's."""
        listed = ask(["squeue", "-h", "-j", self._variables.job, "-o", "%N"]).strip()
        return expand(listed) if listed else []

    def first_port(self, base: int) -> int:
        """Follows from the job's number."""
        return job_port(self._variables.job, base, ephemeral_floor())

    def service_port(self, first_port: int) -> int:
        """The same for all: no two services share a node."""
        return first_port + SERVICE_OFFSET

    def seconds_left(self) -> float | None:
        """Until Slurm's end time of the job."""
        shown = ask(["scontrol", "show", "job", "-o", self._variables.job])
        match = re.search(r"\bEndTime=(\S+)", shown)
        try:
            end = datetime.datetime.fromisoformat(match[1]) if match else None
        except ValueError:  # Unknown
            end = None
        return None if end is None else (end - datetime.datetime.now()).total_seconds()

    def is_ending(self) -> bool:
        """Whether Slurm no longer counts the job as running."""
        state = ask(["squeue", "-h", "-j", self._variables.job, "-o", "%T"]).strip()
        return bool(state) and state != "RUNNING"

    def start(self, step: Step) -> Running:
        """An srun; its words go where the step's own do not."""
        variables = for_container(self._plan, dict(step.variables))
        # Its own session: a signal for the batch step's process group must not end it.
        process = subprocess.Popen(
            srun_command(self._plan, step),
            env={**inherited(), **variables},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        return SrunStep(step.name, process)

    def ask_to_end(self, running: Sequence[Running]) -> None:
        """By scancel: an srun that is told to end kills its tasks at once."""
        names = {step.name for step in running if isinstance(step, SrunStep)}
        try:
            listed = ask(["squeue", "-s", "-h", "-j", self._variables.job, "-o", "%i %j"])
        except RuntimeError:
            return  # they are killed after the grace period
        pairs = [line.split(None, 1) for line in listed.splitlines()]
        steps = [pair[0] for pair in pairs if len(pair) == 2 and pair[1].strip() in names]
        if steps:
            complaint(["scancel", "--signal=TERM", *steps])

    def requeue(self) -> str:
        """`scontrol requeue`."""
        return complaint(["scontrol", "requeue", self._variables.job])

    def submit_successor(self, script: Path, exclude: Sequence[str]) -> str:
        """An sbatch: the nodes that a job must not use cannot be changed once it has run."""
        array = [f"--array={self.array_task}"] if self.array_task else []
        command = [
            *("sbatch", "--parsable", f"--dependency=afterany:{self._variables.job}", *array),
            *(f"--exclude={','.join(exclude)}", str(script)),
        ]
        return ask(command).strip().split(";")[0]

    def cancel(self, job: str) -> None:
        """`scancel`."""
        complaint(["scancel", job])


class SrunStep:
    """A running srun."""

    def __init__(self, name: str, process: subprocess.Popen) -> None:
        self.name = name
        self._process = process

    def poll(self) -> int | None:
        """Its exit code: 0 has been seen after nodes were lost."""
        return self._process.poll()

    def kill(self) -> None:
        """srun kills its tasks when it is told to end; killed itself, it would leave them."""
        self._process.terminate()

    def abandon(self) -> None:
        """An srun that ends, or the process that watches over it, has Slurm end the step of this
        number, which may be that of a later attempt: both are killed together."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)


def srun_command(plan: Plan, step: Step) -> list[str]:
    """The srun of a step. It repeats every resource: since 22.05 a step inherits none."""
    count = len(step.nodes)
    log = "" if step.one_log else ".%N"
    directory = str(step.logs).replace("%", "%%")
    gpus = [f"--gpus-per-node={step.gpus}"] if step.gpus else []
    contained = list(step.command)
    if not step.outside_container:
        contained = [*srun_options(plan, sorted(step.variables)), *in_container(plan, contained)]
    return [
        "srun",
        f"--job-name={step.name}",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        f"--nodelist={','.join(node.name for node in step.nodes)}",
        f"--cpus-per-task={step.cpus}",
        *gpus,
        f"--kill-on-bad-exit={int(step.ends_together)}",
        *(["--wait=30"] if step.ends_together else []),
        # Steps on one node block each other without it; --exact deals a shared node's GPUs out.
        "--exact" if step.shares and step.gpus else "--overlap",
        # A step over several nodes that must end together ends with the first that is lost.
        *(["--no-kill"] if plan.hot_spares and not (step.ends_together and count > 1) else []),
        "--unbuffered",
        *(["--label"] if step.one_log else []),
        f"--output={directory}/{step.name}{log}.log",
        "--open-mode=append",
        *contained,
    ]


def expand(nodelist: str) -> list[str]:
    """The names in a node list such as n[1-3,7]."""
    return ask(["scontrol", "show", "hostnames", nodelist]).split()


def ask(command: Sequence[str]) -> str:
    """What a command of Slurm answers; RuntimeError where it does not, or refuses.

    A controller that is away for a while is asked again.
    """
    give_up = time.monotonic() + PATIENCE_S
    while True:
        said = _try(command)
        if said.returncode == 0:
            return said.stdout
        is_away = any(sign in said.stderr for sign in AWAY)
        if not is_away or time.monotonic() > give_up:
            raise RuntimeError(f"{' '.join(command[:3])}: {said.stderr.strip() or 'failed'}")
        time.sleep(RETRY_S)


def complaint(command: Sequence[str]) -> str:
    """Empty where the command succeeded, else what it said."""
    try:
        ask(command)
    except RuntimeError as error:
        return str(error)
    return ""


def _try(command: Sequence[str]) -> subprocess.CompletedProcess:
    try:
        return subprocess.run(
            list(command),
            env=for_submission() if command[0] == "sbatch" else inherited(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", AWAY[0])
    except OSError as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))
