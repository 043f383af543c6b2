"""Checks of the nodes before anything is started on them."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from credit_launch.environment import node_name
from credit_launch.files import AttemptFiles, publish, read_json
from credit_launch.plan import Plan, read_plan
from credit_launch.topology import Node

SHARED_WAIT_S = 20.0
"""Network file systems show a new file to other nodes after some seconds."""
LAST_LINES = 5


@dataclass(frozen=True)
class Verdict:
    """What the checks found."""

    good: tuple[Node, ...]
    bad: dict[str, str]
    """Why not, of each other node."""

    @property
    def all_refused(self) -> bool:
        """Every node said itself why it cannot run this: not the nodes are bad."""
        return not self.good and all(why != SILENT for why in self.bad.values())


SILENT = "did not answer in time"


def prepare(attempt: AttemptFiles) -> None:
    """Writes what the nodes must be able to read."""
    publish(attempt.token, secrets.token_hex(16))


def command(plan: Plan, package: Path, plan_file: Path, attempt: AttemptFiles) -> list[str]:
    """Runs the checks on a node, where and as tasks run."""
    return [plan.task_python, str(package), "check-node", str(plan_file), str(attempt.root)]


def collect(attempt: AttemptFiles, nodes: Sequence[Node]) -> Verdict:
    """What the nodes have answered."""
    answers = {node: read_json(attempt.checks / f"{node.name}.json") for node in nodes}
    good = tuple(node for node, answer in answers.items() if answer.get("ok"))
    bad = {
        node.name: str(answer.get("why", SILENT))
        for node, answer in answers.items()
        if not answer.get("ok")
    }
    return Verdict(good, bad)


def describe(verdict: Verdict) -> str:
    """The bad nodes and why, those with the same reason together."""
    by_reason: dict[str, list[str]] = {}
    for name, why in verdict.bad.items():
        by_reason.setdefault(why, []).append(name)
    return "; ".join(f"{', '.join(names)}: {why}" for why, names in by_reason.items())


def check_node(plan_file: Path, attempt_root: Path) -> int:
    """Makes the checks on this node and leaves the answer; the exit code."""
    plan, attempt, name = read_plan(plan_file), AttemptFiles(attempt_root), node_name()
    why = problem_here(plan, attempt)
    answer = {"ok": not why, "why": why, "node": name, "time": time.time()}
    publish(attempt.checks / f"{name}.json", json.dumps(answer) + "\n")
    return 1 if why else 0


def problem_here(plan: Plan, attempt: AttemptFiles) -> str:
    """Why this node cannot run tasks; empty where it can."""
    if not _sees_token(attempt):
        return f"does not see the files of {attempt.root}; is the run directory shared?"
    if plan.needs_module and importlib.util.find_spec(plan.needs_module) is None:
        return (
            f"{plan.task_python} cannot import {plan.needs_module}; install it there, or set "
            "launch.container.python or launch.prologue"
        )
    if plan.preflight:
        return _run_users_check(plan)
    return ""


def _sees_token(attempt: AttemptFiles) -> bool:
    deadline = time.monotonic() + SHARED_WAIT_S
    while time.monotonic() < deadline:
        try:
            if attempt.token.read_text():
                return True
        except OSError:
            time.sleep(0.2)
    return False


def _run_users_check(plan: Plan) -> str:
    limit = plan.limits.preflight_seconds
    with tempfile.TemporaryFile() as said:
        try:
            # Its own session, so that its children can be ended with it.
            program = subprocess.Popen(
                list(plan.preflight),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return f"launch.preflight: {error}"
        try:
            code = program.wait(limit)
        except subprocess.TimeoutExpired:
            return f"launch.preflight took longer than {limit} s"
        finally:
            _end_session(program)
        said.seek(0)
        lines = said.read().decode(errors="replace").strip().splitlines()
    if code == 0:
        return ""
    last = " / ".join(lines[-LAST_LINES:])
    return f"launch.preflight ended with {code}: {last or 'it said nothing'}"


def _end_session(program: subprocess.Popen) -> None:
    """Ends the program and what it left running."""
    with contextlib.suppress(ProcessLookupError):  # nothing is left
        os.killpg(program.pid, signal.SIGKILL)
    program.wait()
