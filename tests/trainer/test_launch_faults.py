"""Engines without memory, ranks that die or hang in a launched run, and a launch with another
layout: the run ends as if nothing had happened.

The same with engines and nodes that die, on a live Slurm, is in tests/slurm.
"""

import signal
import subprocess
import time

import pytest
from rollouts.node_checks import core_of
from rollouts.starving import out_of_memory
from slurm.faults import Fault, FaultTable
from trainer.launched_runs import (
    LaunchedRun,
    launched,
    lost_rollouts,
    require_same_rollouts,
)
from trainer.step_records import FLEET, lasting

from megatron_credit.rollouts.registry import read_entry

STEPS = 8
HANG_S = 15.0
"""Longer than a phase here."""
SETTINGS = (f"trainer.steps={STEPS}",)
OTHER_LAYOUT = ("parallel.tensor=2", "launch.trainer_nodes=1", "launch.ranks_per_node=2")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    root = tmp_path_factory.mktemp("launched") / "undisturbed"
    with launched(root, *SETTINGS) as run:
        assert run.finish() == 0, (root.parent / "undisturbed.log").read_text()
    return run


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory):
    """A run whose engine runs out of memory, of which a rank is killed, and that is then stopped;
    launched again under another layout, a rank of it hangs. Where it was stopped, and what the
    faults cost."""
    root = tmp_path_factory.mktemp("launched") / "disturbed"
    log = root.parent / "disturbed.log"
    costs = {}
    with launched(root, *SETTINGS) as run:
        run.wait_step(1)
        costs["memory"] = starve_engine(run)
        run.wait_step(2)
        costs["killed"] = end_rank(run, 1, signal.SIGKILL, attempt=1)
        run.wait_step(3, attempt=2)
        run.process.send_signal(signal.SIGINT)
        assert run.finish() == 0, log.read_text()
        assert run.status()["state"] == "stopped"
    stopped = run.reached()
    with launched(root, *SETTINGS, *OTHER_LAYOUT, f"run.hang_timeout_s={HANG_S}") as run:
        run.wait_step(stopped + 1, attempt=3)
        costs["hung"] = end_rank(run, 1, signal.SIGSTOP, attempt=3)
        assert run.finish() == 0, log.read_text()
    return run, stopped, costs


def starve_engine(run: LaunchedRun) -> tuple[float, float, int]:
    """The engine gets no more memory; seconds until it was lost and until a step was done."""
    (path,) = (run.attempts()[0] / "engines").glob("*.json")
    entry = read_entry(path)
    start = time.monotonic()
    with out_of_memory(core_of(entry)):
        run.wait(lambda: read_entry(path) != entry, "the loss to be seen")
        detected, reached = time.monotonic() - start, run.reached()
    run.wait(lambda: run.reached() > reached, "the step after the loss")
    return detected, time.monotonic() - start, 0


def end_rank(run: LaunchedRun, rank: int, number: int, *, attempt: int) -> tuple[float, float, int]:
    """Kills or stops a rank; seconds until it was seen and until a step was done, and how many
    steps were done again."""
    start = time.monotonic()
    run.ranks()[rank].send_signal(number)
    reached = run.reached()
    failure = run.attempts()[attempt - 1] / "failure.json"
    run.wait(failure.exists, f"the end of attempt {attempt}")
    detected = time.monotonic() - start
    following = run.root / "launch" / f"attempt-{attempt + 1:03d}" / "start.json"
    run.wait(following.exists, f"attempt {attempt + 1}")
    first = run.start_step(attempt + 1)
    run.wait(lambda: run.reached() > first, "the first step of the new attempt")
    return detected, time.monotonic() - start, reached - first


def test_the_run_ends_as_if_nothing_had_happened(undisturbed, disturbed):
    run, stopped, _ = disturbed
    assert run.start_step(3) == stopped and 3 <= stopped < STEPS
    assert [record["step"] for record in run.records()] == list(range(STEPS + 1))
    assert lost_rollouts(run, STEPS) == 0
    records, expected = run.records(), undisturbed.records()
    same_layout = slice(stopped + 1)
    assert [lasting(one, *FLEET) for one in records[same_layout]] == [
        lasting(one, *FLEET) for one in expected[same_layout]
    ]
    require_same_rollouts(run, undisturbed, last=stopped)
    for record, other in zip(records[stopped + 1 :], expected[stopped + 1 :], strict=True):
        for name in ("reward/mean", "loss", "grad_norm", "policy/entropy"):
            assert record[name] == pytest.approx(other[name], rel=1e-5, abs=1e-5), name


@pytest.fixture
def small_disk(tmp_path):
    """A file system that holds one checkpoint and a half."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=14m", "tmpfs", str(place)])
    if mounted.returncode:
        pytest.skip("file systems cannot be mounted here")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_full_disk_ends_the_run_with_the_reason(small_disk):
    with launched(small_disk / "run", *SETTINGS, *OTHER_LAYOUT) as run:
        assert run.finish() == 1
    (path,) = (run.root / "checkpoints").iterdir()
    assert path.name == "step-000003"
    status = run.status()
    assert status["state"] == "gave-up" and len(run.attempts()) == 1
    assert "[Errno 28] the checkpoint could not be written" in status["why"]
    assert "step-000006" in status["why"] and "Make room" in status["why"]
    assert not run.failure(1)["retry"]
    outcome = "gave up at once with the reason; the checkpoint before is whole"
    fault = Fault("disk full", "real", None, None, outcome=outcome)
    FaultTable.from_environment().add(fault)


def test_each_fault_is_seen_named_and_outlived(disturbed):
    run, _, costs = disturbed
    assert len(run.attempts()) == 4
    (path,) = (run.attempts()[0] / "logs").glob("rollout-0.*.log")
    assert "rollout-0.0 is lost, 2 restarts left" in path.read_text()
    killed, hung = run.failure(1), run.failure(3)
    assert killed["reason"].startswith("rank 1 on node local1 was ended by SIGKILL")
    assert killed["rank"] == 1 and killed["retry"]
    assert hung["reason"].startswith("no progress for ")
    assert "rank 1 (node " in hung["reason"] and "silent; rank 0 (node " in hung["reason"]
    assert hung["retry"] and hung["phase"] in {"rollout", "signals", "train", "sync", "checkpoint"}
    assert costs["hung"][0] < 4 * HANG_S
    table = FaultTable.from_environment()
    outcomes = {
        "memory": (
            "engine out of memory",
            "engine started again, given the current weights, asked again; trainer untouched",
        ),
        "killed": ("a trainer's rank killed", "new attempt from the checkpoint"),
        "hung": (
            f"a trainer's rank stopped (hang_timeout_s = {HANG_S:g}), after a change of layout",
            "watchdog names rank and phase, new attempt from the checkpoint; "
            "within 1e-5 of the run under the first layout",
        ),
    }
    for name, (fault, outcome) in outcomes.items():
        detected, resumed, repeated = costs[name]
        is_equal = None if name == "hung" else True
        table.add(Fault(fault, "real", detected, resumed, repeated, 0, is_equal, outcome))
