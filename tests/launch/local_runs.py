"""Runs of stand-ins on this machine, supervised by the packed launcher."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from credit_launch.files import LaunchFiles, read_json
from credit_launch.pack import write_package
from credit_launch.plan import Limits, Plan, Role, Slurm, to_json
from credit_launch.processes import is_alive

STAND_IN = Path(__file__).with_name("stand_in.py")
PATIENCE_S = 240
"""For what takes seconds on a quiet machine."""


def act(*words):
    """The command of a stand-in that does this."""
    return (sys.executable, str(STAND_IN), *words)


def trainer(*words, nodes=1):
    """The leader."""
    return Role("trainer", act(*words), nodes=nodes)


def rollout(*words, replicas=1, max_restarts=3):
    """Engines."""
    return Role(
        "rollout", act(*words), replicas=replicas, max_restarts=max_restarts, is_essential=False
    )


def wait_for(found):
    """Until it is so."""
    deadline = time.monotonic() + PATIENCE_S
    while not found():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


class LocalRun:
    """A run directory and the supervisor at work in it."""

    def __init__(self, root, *roles, limits=None, **fields):
        self.root = root
        self.files = LaunchFiles(root)
        self.files.root.mkdir(parents=True, exist_ok=True)
        self.plan = Plan(
            run=str(root),
            roles=roles,
            slurm=Slurm("local"),
            task_python=sys.executable,
            limits=limits or Limits(grace_seconds=2, preflight_seconds=PATIENCE_S),
            **fields,
        )
        self.files.plan.write_text(to_json(self.plan))
        write_package(self.files.package)
        self.process = None

    def start(self):
        """Starts the supervisor."""
        self.process = subprocess.Popen(
            [sys.executable, str(self.files.package), "local", str(self.files.plan)],
            stdout=(self.root / "said").open("a"),
            stderr=subprocess.STDOUT,
        )
        return self

    def wait(self):
        """The supervisor's exit code."""
        return self.process.wait(PATIENCE_S)

    def run(self):
        """Starts it and waits; its exit code."""
        return self.start().wait()

    def signal(self, number):
        """Sends it to the supervisor."""
        self.process.send_signal(number)

    def kill(self):
        """The worst that can happen to it."""
        self.signal(signal.SIGKILL)
        self.process.wait()

    def has(self, name):
        """Whether a stand-in has left this mark."""
        return (self.root / name).exists()

    def wait_mark(self, name):
        """What a stand-in wrote, as soon as it has."""
        wait_for(lambda: self.has(name))
        return (self.root / name).read_text()

    @property
    def status(self):
        """status.json."""
        return read_json(self.files.status)

    @property
    def ends(self):
        """How the attempts ended."""
        return [json.loads(attempt.end.read_text())["state"] for attempt in self.files.attempts()]


def gone(pids):
    """Whether none of them runs."""
    return not any(is_alive(pid) for pid in pids)
