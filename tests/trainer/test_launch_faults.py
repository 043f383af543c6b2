"""Processes that die or hang in a launched run: the run ends as if nothing had happened.

The same with nodes that die, on a live Slurm, is in tests/slurm.
"""

import signal
import time

import pytest
from slurm.faults import Fault, FaultTable
from trainer.launched_runs import LaunchedRun, launched, lost_rollouts, require_same

STEPS = 10
HANG_S = 20.0
"""Longer than a phase here, shorter than the start of an engine."""
SETTINGS = (f"trainer.steps={STEPS}",)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    root = tmp_path_factory.mktemp("launched") / "undisturbed"
    with launched(root, *SETTINGS) as run:
        assert run.finish() == 0, (root.parent / "undisturbed.log").read_text()
    return run


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory):
    """A run in which an engine and a rank are killed, and that is stopped; launched again, a rank
    of it hangs."""
    root = tmp_path_factory.mktemp("launched") / "disturbed"
    log = root.parent / "disturbed.log"
    found = {}
    with launched(root, *SETTINGS) as run:
        run.wait_step(1)
        found["engine"] = kill_engine(run)
        run.wait_step(3)
        found["killed"] = end_rank(run, 1, signal.SIGKILL, attempt=1)
        run.wait_step(5, attempt=2)
        run.process.send_signal(signal.SIGINT)
        assert run.finish() == 0, log.read_text()
        assert run.status()["state"] == "stopped"
    with launched(root, *SETTINGS, f"run.hang_timeout_s={HANG_S}") as run:
        run.wait_step(8, attempt=3)
        found["hung"] = end_rank(run, 1, signal.SIGSTOP, attempt=3)
        assert run.finish() == 0, log.read_text()
    return run, found


def kill_engine(run: LaunchedRun) -> tuple[float, float, int]:
    """Kills the engine; seconds until that was seen and until a step was done, and 0 steps."""
    (entry,) = (run.attempts()[0] / "engines").glob("*.json")
    before, start = entry.read_text(), time.monotonic()
    run.engines()[0].kill()
    run.wait(lambda: not entry.exists() or entry.read_text() != before, "the loss of the engine")
    detected, reached = time.monotonic() - start, run.reached()
    run.wait(lambda: run.reached() > reached, "a step with the new engine")
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
    run, _ = disturbed
    assert [record["step"] for record in run.records()] == list(range(STEPS + 1))
    assert lost_rollouts(run, STEPS) == 0
    require_same(run, undisturbed)


def test_each_fault_is_seen_named_and_outlived(disturbed):
    run, found = disturbed
    assert len(run.attempts()) == 4
    killed, hung = run.failure(1), run.failure(3)
    assert killed["reason"].startswith("rank 1 on node local1 was ended by SIGKILL")
    assert killed["rank"] == 1 and killed["retry"]
    assert hung["reason"].startswith("no progress for 2")
    assert "rank 1 (node " in hung["reason"] and "silent; rank 0 (node " in hung["reason"]
    assert hung["retry"] and hung["phase"] in {"rollout", "signals", "train", "sync", "checkpoint"}
    assert found["hung"][0] < 4 * HANG_S
    table = FaultTable.from_environment()
    outcomes = {
        "engine": ("engine killed (launch local)", "started again, given the current weights"),
        "killed": ("trainer rank killed", "new attempt from the checkpoint"),
        "hung": (
            f"trainer rank stopped, hang_timeout_s={HANG_S:g}",
            "watchdog names the rank and its phase, new attempt from the checkpoint",
        ),
    }
    for name, (fault, outcome) in outcomes.items():
        detected, resumed, repeated = found[name]
        table.add(Fault(fault, "real", detected, resumed, repeated, 0, True, outcome))


def test_a_run_that_was_stopped_goes_on_under_another_layout(undisturbed, tmp_path):
    root = tmp_path / "stopped"
    with launched(root, *SETTINGS) as run:
        run.wait_step(2)
        run.process.send_signal(signal.SIGINT)
        assert run.finish() == 0
    stopped = run.reached()
    assert run.status()["state"] == "stopped" and 2 <= stopped < STEPS
    other = ("parallel.tensor=2", "launch.trainer_nodes=1", "launch.ranks_per_node=2")
    with launched(root, *SETTINGS, *other) as run:
        assert run.finish() == 0
    assert run.start_step(2) == stopped
    assert lost_rollouts(run, STEPS) == 0
    for record, expected in zip(run.records()[1:], undisturbed.records()[1:], strict=True):
        for name in ("reward/mean", "loss", "grad_norm", "policy/entropy"):
            assert record[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5), name
