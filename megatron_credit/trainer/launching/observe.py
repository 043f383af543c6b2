"""What a launched run's files and Slurm say about it: `status`, `stop`, `logs`."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from credit_launch.files import AttemptFiles, LaunchFiles, is_locked, read_json
from credit_launch.journal import write_state
from credit_launch.times import in_words

from megatron_credit.trainer.launching import site

ENDED = ("done", "stopped", "gave-up")
"""States that no supervisor leaves again."""
POLL_S = 0.5


def launch_files(run: Path) -> LaunchFiles:
    """The run's files; ValueError where it was not launched."""
    files = LaunchFiles(run.absolute())
    if not files.plan.is_file():
        raise ValueError(
            f"{run} holds no launched run (no launch/plan.json); give the run.directory of one"
        )
    return files


def status_of(run: Path) -> dict[str, Any]:
    """State, attempt, progress, job and tasks; `alive`: whether anybody works on it."""
    files = launch_files(run)
    status = read_json(files.status) or {"state": "not started", "attempt": 0, "why": ""}
    job = read_json(files.job).get("job")
    slurm = site.job_state(str(job)) if job and site.has_slurm() else ""
    progress = files.read_progress()
    attempts = files.attempts()
    topology = read_json(attempts[-1].topology) if attempts else {}
    tasks = {
        name: [node["name"] for node in task["nodes"]]
        for name, task in topology.get("tasks", {}).items()
    }
    return {
        "run": str(files.run),
        **status,
        "job": job,
        "slurm": slurm,
        "alive": bool(slurm) or is_locked(files.lock),
        "checkpoint": None if progress < 0 else progress,
        "attempts": len(attempts),
        "tasks": tasks,
        "trainer": read_json(files.run / "status.json"),
    }


def status_lines(found: dict[str, Any]) -> list[str]:
    """The same for people."""
    state = found["state"]
    if not found["alive"] and state not in (*ENDED, "not started"):
        state = f"over while {state}: cancelled, out of time, or its machine was lost"
    since = in_words(time.time() - found["time"]) if "time" in found else "?"
    lines = [f"{found['run']}", f"  state       {state}, for {since}"]
    if found["why"]:
        lines.append(f"  why         {found['why']}")
    if found["job"]:
        lines.append(f"  job         {found['job']} {found['slurm'] or 'not in the queue'}")
    lines.append(f"  attempts    {found['attempts']}")
    step = found["checkpoint"]
    lines.append(f"  checkpoint  {'none yet' if step is None else f'step {step}'}")
    trainer = found["trainer"]
    if trainer and found["alive"]:
        lines.append(f"  step        {trainer['step']} of {trainer['steps']}: {trainer['phase']}")
    lines += [f"  {name:<11} {', '.join(nodes)}" for name, nodes in found["tasks"].items()]
    return lines


def stop_run(run: Path, *, now: bool) -> str:
    """Asks the run to save and end, or ends it at once; what will happen, in words."""
    files = launch_files(run)
    found = status_of(run)
    if not found["alive"]:
        return f"nothing to stop: {found['state']}"
    files.stop.touch()
    jobs = files.jobs()
    if now or found["slurm"] == "PENDING":
        for job in jobs:
            site.cancel(job)
        if found["slurm"] == "PENDING":
            write_state(files, "stopped", why="cancelled by the user while it waited")
        if jobs:
            return f"cancelled job {', '.join(jobs)}"
        files.stop_now.touch()
        return "its processes are being ended"
    return "it saves after the present step, then ends; it will not be queued again"


@dataclass(frozen=True)
class LogQuery:
    """Which logs."""

    task: str | None = None
    """As in the topology; None: all tasks."""
    node: str | None = None
    attempt: int | None = None
    """None: the newest."""


def find_logs(run: Path, query: LogQuery) -> list[Path]:
    """The logs, by name; ValueError, with what there is, where there are none."""
    files = launch_files(run)
    attempts = [*files.attempts(), *part_attempts(files, query.attempt)]
    if query.attempt is not None:
        chosen = [attempt for attempt in attempts if attempt.number == query.attempt]
    else:
        chosen = [*files.attempts()[-1:], *part_attempts(files, None)]
    paths = [path for attempt in chosen for path in sorted(attempt.logs.glob("*.log"))]
    found = [path for path in paths if matches(path, query)]
    if not found:
        there = ", ".join(sorted({path.name for path in paths})) or "none"
        numbers = ", ".join(str(attempt.number) for attempt in files.attempts()) or "none"
        raise ValueError(f"no such log; logs: {there}; attempts: {numbers}")
    return found


def part_attempts(files: LaunchFiles, number: int | None) -> list[AttemptFiles]:
    """Attempts of the jobs of the rollout array: the newest of each, or those of this number."""
    found = []
    for home in sorted(files.root.glob("rollout-*/")):
        attempts = LaunchFiles(files.run, home.name).attempts()
        found += attempts[-1:] if number is None else attempts
    return found


def matches(path: Path, query: LogQuery) -> bool:
    """Whether a log, TASK.NODE.log or TASK.log, is of this task and node."""
    task, _, node = path.name.removesuffix(".log").partition(".")
    return query.task in (None, task) and query.node in (None, node)


def last_lines(path: Path, count: int) -> list[str]:
    """The end of a log."""
    return path.read_text(errors="replace").splitlines()[-count:] if count else []


def follow_logs(run: Path, query: LogQuery) -> Iterator[tuple[Path, str]]:
    """New lines of the logs as they come, those of later attempts too, until the run is over."""
    seen: dict[Path, int] = {path: path.stat().st_size for path in find_logs(run, query)}
    while True:
        is_over = not status_of(run)["alive"]
        for path in find_logs(run, query):
            with path.open("rb") as file:
                file.seek(seen.get(path, 0))
                text = file.read()
            # A line that is being written comes with its end.
            whole = text[: text.rfind(b"\n") + 1] if not is_over else text
            seen[path] = seen.get(path, 0) + len(whole)
            for line in whole.decode(errors="replace").splitlines():
                yield path, line
        if is_over:
            return
        time.sleep(POLL_S)
