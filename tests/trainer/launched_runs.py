"""Runs of the real trainer and engines by `launch local`, watched and disturbed from outside."""

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "launch" / "cpu_two_nodes.toml"
PATIENCE_S = 400
"""For what takes half a minute on a quiet machine."""
PROMPTS, SAMPLES = 4, 4
SMALL = (
    f"trainer.prompts_per_step={PROMPTS}",
    f"trainer.samples_per_prompt={SAMPLES}",
    "evaluation.every=0",
    "checkpoint.every=3",
    "checkpoint.keep_last=9",
    "parallel.tensor=1",
    "launch.trainer_nodes=2",
    "launch.ranks_per_node=1",
)


class LaunchedRun:
    """A run that `launch local` has in hand."""

    def __init__(self, root: Path, process: subprocess.Popen | None = None) -> None:
        self.root = root
        self.process = process

    def records(self) -> list[dict]:
        """The metrics of the steps so far."""
        path = self.root / "metrics.jsonl"
        if not path.exists():
            return []
        *whole, _ = path.read_text().split("\n")
        return [json.loads(line) for line in whole]

    def attempts(self) -> list[Path]:
        """The attempts' directories."""
        return sorted((self.root / "launch").glob("attempt-*"))

    def status(self) -> dict:
        """What the supervisor says."""
        return json.loads((self.root / "launch" / "status.json").read_text())

    def failure(self, attempt: int) -> dict:
        """What an attempt failed of."""
        path = self.root / "launch" / f"attempt-{attempt:03d}" / "failure.json"
        return json.loads(path.read_text())

    def start_step(self, attempt: int) -> int:
        """The step of the checkpoint that an attempt went on from."""
        path = self.root / "launch" / f"attempt-{attempt:03d}" / "start.json"
        checkpoint = json.loads(path.read_text())["checkpoint"]
        return int(checkpoint.rpartition("-")[2]) if checkpoint else 0

    def reached(self) -> int:
        """The newest step with metrics; -1 before any."""
        steps = [record["step"] for record in self.records()]
        return steps[-1] if steps else -1

    def wait(self, condition, what: str) -> None:
        """Returns when the condition holds; fails where the run ends before, or it takes too
        long."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.process.poll() is None, f"the run ended before {what}: {self.status()}"
            assert time.monotonic() < deadline, f"{what} took too long: {self.status()}"
            time.sleep(0.05)

    def wait_step(self, step: int, *, attempt: int = 1) -> None:
        """Returns when the attempt has done this step."""
        start = self.root / "launch" / f"attempt-{attempt:03d}" / "start.json"
        self.wait(start.exists, f"the start of attempt {attempt}")
        self.wait(lambda: self.reached() >= step, f"step {step}")

    def ranks(self) -> dict[int, psutil.Process]:
        """The trainer's processes by rank."""
        return {
            int(process.environ()["RANK"]): process
            for process in processes_of(self.root)
            if "megatron_credit.trainer.worker" in process.cmdline()
            and "torch.distributed.run" not in process.cmdline()
        }

    def finish(self) -> int:
        """The exit code of `launch local`."""
        return self.process.wait(PATIENCE_S)


def processes_of(root: Path) -> list[psutil.Process]:
    """All tasks of a run, which know its attempt by their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("CREDIT_ATTEMPT", "").startswith(str(root)):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


@contextmanager
def launched(root: Path, *overrides: str):
    """A run in the background; nothing of it is left afterwards."""
    sets = [f"run.directory={json.dumps(str(root))}", *SMALL, *overrides]
    words = [part for one in sets for part in ("--set", one)]
    root.parent.mkdir(parents=True, exist_ok=True)
    with (root.parent / f"{root.name}.log").open("a") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "megatron_credit.cli", "launch", "local", str(CONFIG), *words],
            cwd=ROOT,
            env={**os.environ, "HOME": str(root.parent)},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    run = LaunchedRun(root, process)
    try:
        yield run
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        deadline = time.monotonic() + 60
        while processes_of(root) and time.monotonic() < deadline:
            time.sleep(0.2)
        left = processes_of(root)
        for one in left:
            one.kill()
    assert not left, left


def lost_rollouts(run: LaunchedRun, steps: int) -> int:
    """Rollouts of the run's steps that are missing or there more than once."""
    seen = []
    for path in (run.root / "rollouts").glob("step-*.jsonl"):
        rollouts = [json.loads(line) for line in path.read_text().splitlines()]
        seen += [(path.name, one["prompt_id"], one["sample"]) for one in rollouts]
    return steps * PROMPTS * SAMPLES - len(set(seen)) + len(seen) - len(set(seen))


def require_same_rollouts(run: LaunchedRun, undisturbed: LaunchedRun, *, last: int) -> None:
    """The rollouts of the steps up to the last are those of the undisturbed run, bit for bit."""
    for step in range(1, last + 1):
        name = f"rollouts/step-{step:06d}.jsonl"
        assert (run.root / name).read_bytes() == (undisturbed.root / name).read_bytes(), name
