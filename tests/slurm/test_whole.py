"""The real trainer on two nodes, a real engine on a third: faults must not change a single bit."""

import threading

import pytest
from slurm.faults import Fault
from slurm.runs import Clock
from slurm.whole import (
    PATIENCE_S,
    STEPS,
    launched,
    lost_rollouts,
    metrics,
    num_records,
    require_same,
    start_step,
    wait_going_on,
    wait_record,
)

pytestmark = [pytest.mark.slurm, pytest.mark.beside]

_LOCK = threading.Lock()
_UNDISTURBED = {}


def undisturbed(lab):
    """The run that nothing happens to, made by whoever needs it first."""
    with _LOCK:
        if "run" not in _UNDISTURBED:
            with launched(lab, "undisturbed") as run:
                assert run.wait_finished(limit_s=PATIENCE_S) == "COMPLETED", run.story()
                _UNDISTURBED["run"] = run
    return _UNDISTURBED["run"]


def finished(run, lab, *, attempts):
    """The run's end, the same as that of the undisturbed one; lost rollouts."""
    assert run.wait_finished(limit_s=PATIENCE_S) == "COMPLETED", run.story()
    assert len(run.attempts()) == attempts, run.story()
    lost = lost_rollouts(run)
    assert lost == 0
    require_same(run, undisturbed(lab))
    return lost


def test_a_run_over_three_nodes_learns_and_leaves_everything(lab):
    run = undisturbed(lab)
    assert [record["step"] for record in metrics(run)] == list(range(STEPS + 1))
    assert run.status()["state"] == "done" and len(run.attempts()) == 1
    assert lost_rollouts(run) == 0
    assert max(r.get("mismatch/logprob_abs_max", 0) for r in metrics(run)) <= 1e-4
    topology = run.topology()
    assert len({*topology["trainer"], *topology["rollout-0"]}) == 3
    assert run.json("progress") == STEPS


def test_a_warning_in_the_middle_loses_nothing(lab, fault_table):
    with launched(lab, "warned") as run:
        wait_record(run, 2)
        clock = Clock.started()
        lab.call("scancel", "--batch", "--signal=USR1", run.job)
        run.wait(lambda: (run.attempts()[0] / "STOPPED").exists(), "the save")
        detected, saved = clock.now(), run.json("attempt-001/STOPPED")["step"]
        resumed = clock.until(wait_going_on(run, 2))
        assert start_step(run, 2) == saved < STEPS
        lost = finished(run, lab, attempts=2)
    outcome = "saved, queued again, resumed at the same step"
    row = Fault("warning before the time limit", "real", detected, resumed, 0, lost, True, outcome)
    fault_table.add(row)


@pytest.mark.parametrize(
    "which", [0, pytest.param(1, marks=pytest.mark.slow)], ids=["first", "second"]
)
def test_a_trainer_node_without_power_loses_nothing(lab, fault_table, which):
    with launched(lab, f"whole-power-{which}") as run:
        wait_record(run, 4)
        node = run.topology()["trainer"][which]
        clock = Clock.started()
        lab.crash(node)
        reached = num_records(run) - 1
        run.wait(lambda: run.slurm()["Restarts"] == "1", "Slurm to notice")
        detected = clock.now()
        resumed = clock.until(wait_going_on(run, 2))
        lab.revive(node)
        repeated = reached - start_step(run, 2)
        assert 0 <= repeated <= 3
        lost = finished(run, lab, attempts=2)
    place = ("first node of the job", "a trainer node")[which]
    outcome = "queued again by Slurm, resumed on other nodes from the checkpoint"
    row = Fault(f"power off: {place}", "real", detected, resumed, repeated, lost, True, outcome)
    fault_table.add(row)


def test_a_killed_engine_is_started_again_and_its_requests_are_asked_again(lab, fault_table):
    with launched(lab, "engine-killed") as run:
        wait_record(run, 2)
        (node,) = run.topology()["rollout-0"]
        (entry,) = (run.attempts()[0] / "engines").glob("*.json")
        before = entry.read_text()
        clock = Clock.started()
        assert lab.kill(node, "vllm") or lab.kill(node, "VLLM")
        run.wait(lambda: not entry.exists() or entry.read_text() != before, "the loss to be seen")
        detected, reached = clock.now(), num_records(run)
        wait_record(run, reached)
        resumed = clock.now()
        lost = finished(run, lab, attempts=1)
    outcome = "engine started again, given the current weights, asked again; trainer untouched"
    row = Fault("engine killed", "real", detected, resumed, 0, lost, True, outcome)
    fault_table.add(row)
