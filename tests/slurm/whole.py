"""Runs of the real trainer and real engines on a lab, and how they compare."""

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import contextmanager
from pathlib import Path

from slurm.lab import Lab
from slurm.runs import ROOT, Run, new_run
from trainer.step_records import FLEET, lasting

CONFIG = ROOT / "configs/launch/cpu_two_nodes.toml"
STEPS, PROMPTS, SAMPLES = 12, 4, 4
SMALL = (
    f"trainer.steps={STEPS}",
    f"trainer.prompts_per_step={PROMPTS}",
    f"trainer.samples_per_prompt={SAMPLES}",
    "parallel.tensor=1",
    "checkpoint.every=3",
    "launch.trainer_nodes=2",
    "launch.ranks_per_node=1",
    "launch.cpus_per_node=16",
    'launch.time="30:00"',
    "launch.warn_seconds=60",
    "task.eval_size=16",
    "evaluation.every=6",
)
PATIENCE_S = 600
_TURNS = threading.Semaphore(2)
"""Each run is an engine and two ranks: more at once would be too much for a small machine."""


def cli(lab: Lab, *words: str, **variables: str):
    """`megatron-credit WORDS` as the lab's user types it, in the checkout."""
    command = ("env", "-C", str(ROOT), sys.executable, "-m", "megatron_credit.cli", *words)
    return lab.finished(*command, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", **variables)


@contextmanager
def launched(lab: Lab, name: str, *overrides: str):
    """A run that `launch slurm` submitted; cancelled if it is not over in the end."""
    with _TURNS:
        run = new_run(lab, name)
        sets = [
            part
            for override in (f"run.directory={run.root}", *SMALL, *overrides)
            for part in ("--set", override)
        ]
        result = cli(lab, "launch", "slurm", str(CONFIG), *sets)
        assert result.returncode == 0, result.stdout + result.stderr
        run.job = run.json("job.json")["job"]
        try:
            yield run
        finally:
            lab.call("scancel", run.job, check=False)


def metrics(run: Run) -> list[dict]:
    """The records of metrics.jsonl."""
    return run.lines("metrics.jsonl")


def num_records(run: Run) -> int:
    """Whole lines of metrics.jsonl so far."""
    path = run.root / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def rollout_texts(run: Run) -> dict[str, str]:
    """The rollout files."""
    return {path.name: path.read_text() for path in sorted((run.root / "rollouts").iterdir())}


def lost_rollouts(run: Run) -> int:
    """Rollouts that are missing from the finished run, or there more than once."""
    counts: Counter = Counter()
    for path in (run.root / "rollouts").glob("step-*.jsonl"):
        for line in path.read_text().splitlines():
            rollout = json.loads(line)
            counts[path.name, rollout["prompt_id"], rollout["sample"]] += 1
    expected = STEPS * PROMPTS * SAMPLES
    return expected - len(counts) + sum(count - 1 for count in counts.values())


def require_same(run: Run, undisturbed: Run) -> None:
    """Metrics, rollouts and weights are those of the undisturbed run, bit for bit."""
    mine, theirs = metrics(run), metrics(undisturbed)
    assert [record["step"] for record in mine] == [record["step"] for record in theirs]
    different = differences(
        (lasting(record, *FLEET) for record in mine), (lasting(record, *FLEET) for record in theirs)
    )
    assert not different, f"other than undisturbed, by step and name: {different}"
    assert rollout_texts(run) == rollout_texts(undisturbed), "other rollouts than undisturbed"
    name = Path("model/model.safetensors")
    assert (run.root / name).read_bytes() == (undisturbed.root / name).read_bytes(), name


def differences(mine: Iterable[dict], theirs: Iterable[dict]) -> dict[str, tuple]:
    """Values that are not equal, by step and name."""
    return {
        f"{theirs['step']}: {name}": (mine.get(name), theirs.get(name))
        for mine, theirs in zip(mine, theirs, strict=True)
        for name in sorted({*mine, *theirs})
        if mine.get(name) != theirs.get(name)
    }


def start_step(run: Run, attempt: int) -> int:
    """The step of the checkpoint that an attempt went on from."""
    checkpoint = run.json(f"attempt-{attempt:03d}/start.json")["checkpoint"]
    return int(checkpoint.rpartition("-")[2]) if checkpoint else 0


def wait_record(run: Run, step: int) -> None:
    """Wait until this step's metrics are written; record 0 is the evaluation before the first."""
    run.wait(lambda: num_records(run) > step, f"step {step}", PATIENCE_S)


def wait_going_on(run: Run, attempt: int) -> float:
    """When the attempt wrote its first step."""

    def going():
        return (run.launch / f"attempt-{attempt:03d}/start.json").exists()

    run.wait(going, f"the start of attempt {attempt}", PATIENCE_S)
    wait_record(run, start_step(run, attempt) + 1)
    return time.time()
