"""Signals, limits and cancellations: what ends an attempt, and what must stay ended."""

import time
from dataclasses import replace

import pytest
from slurm.faults import Fault
from slurm.runs import Clock, new_run, stand_in_plan, started_run

pytestmark = [pytest.mark.slurm, pytest.mark.beside]


def hosts_of(run, attempt=1):
    """All hosts of an attempt."""
    return [host for hosts in run.topology(attempt).values() for host in hosts]


def require_each_once(run, steps):
    """Every step was done exactly once, in order, over all attempts."""
    assert run.steps() == list(range(1, steps + 1))


def first_step_of(run, attempt):
    """When the attempt did its first step."""
    return next(row["time"] for row in run.lines("steps.jsonl") if row["attempt"] == attempt)


def test_a_warning_saves_and_queues_again_and_no_step_is_lost(lab, fault_table):
    run = started_run(
        lab, "warning", trainer_nodes=2, engines=1, steps=30, save_every=100, save_seconds=1
    )
    run.wait_steps(5)
    clock = Clock.started()
    lab.call("scancel", "--batch", "--signal=USR1", run.job)
    run.wait(lambda: (run.attempts()[0] / "STOPPED").exists(), "the save")
    detected = clock.now()
    saved = run.json("attempt-001/STOPPED")["step"]
    assert run.wait_finished() == "COMPLETED"
    assert len(run.attempts()) == 2 and run.slurm()["Restarts"] == "1"
    assert run.steps(attempt=1)[-1] == saved >= 5
    require_each_once(run, 30)
    resumed = clock.until(first_step_of(run, 2))
    outcome = "saved, queued again, resumed at the same step"
    fault_table.add(
        Fault("warning before the time limit", "stand-in", detected, resumed, 0, outcome=outcome)
    )


def test_a_real_time_limit_is_outlived(lab):
    run = new_run(lab, "time-limit")
    plan = stand_in_plan(run.root, engines=1, steps=1000, seconds=0.5, save_every=1000)
    # Slurm may send the signal up to a minute early.
    limits = replace(plan.limits, warn_seconds=15)
    run.submit(replace(plan, slurm=replace(plan.slurm, time="1"), limits=limits))

    def saved_and_resumed():
        # A warning that comes before the first step leaves nothing to save.
        saved = [k for k, path in enumerate(run.attempts(), 1) if (path / "STOPPED").exists()]
        return [k for k in saved if len(run.steps(attempt=k + 1)) >= 3]

    saved = run.wait(saved_and_resumed, "an attempt after one that saved")[0]
    last = run.json(f"attempt-{saved:03d}/STOPPED")["step"]
    assert run.steps(attempt=saved)[-1] == last
    assert run.steps(attempt=saved + 1)[0] == last + 1
    assert run.steps() == list(range(1, len(run.steps()) + 1))
    assert run.slurm()["TimeLimit"] == "00:01:00"
    lab.call("scancel", run.job)
    assert run.wait_finished() == "CANCELLED"


def test_a_step_longer_than_the_warning_is_queued_again_before_the_limit(lab):
    run = new_run(lab, "too-slow")
    plan = stand_in_plan(run.root, engines=1, steps=3, seconds=200)
    run.submit(replace(plan, slurm=replace(plan.slurm, time="1")))
    run.wait_state("requeued")
    assert "launch.warn_seconds = 30" in run.status()["why"]
    run.wait(lambda: run.slurm()["Restarts"] == "1", "the requeue")
    lab.call("scancel", run.job)


def test_a_cancelled_run_stays_cancelled_and_leaves_no_process(lab, fault_table):
    run = started_run(lab, "cancel", trainer_nodes=2, engines=1, steps=1000, save_every=1000)
    run.wait_steps(3)
    hosts = hosts_of(run)
    assert all(run.processes(host) for host in hosts)
    clock = Clock.started()
    lab.call("scancel", run.job)
    run.wait(lambda: not run.processes(*hosts), "the end of all processes")
    gone = clock.now()
    assert run.wait_finished() == "CANCELLED"
    # A job that queues itself again would start after the 6 s that Slurm makes it wait.
    end = time.monotonic() + 12
    while time.monotonic() < end:
        assert run.slurm()["JobState"] == "CANCELLED" and len(run.attempts()) == 1
        time.sleep(0.5)
    assert run.processes(*hosts) == []
    fault_table.add(
        Fault("scancel", "stand-in", gone, None, 0, outcome="stays cancelled, nothing left running")
    )


def test_a_cancelled_run_can_be_submitted_anew_and_goes_on(lab):
    run = started_run(lab, "anew", engines=1, steps=40, save_every=5)
    run.wait_steps(8)
    lab.call("scancel", run.job)
    assert run.wait_finished() == "CANCELLED"
    saved = int((run.launch / "progress").read_text())
    first = run.steps()[-1]
    second = lab.call("sbatch", "--parsable", str(run.launch / "job.sbatch")).strip()
    assert run.wait_finished(second) == "COMPLETED"
    assert run.steps(attempt=2) == list(range(saved + 1, 41)) and saved >= first - 5


def test_preemption_saves_gives_way_and_comes_back(lab, fault_table):
    run = new_run(lab, "preempted")
    plan = stand_in_plan(run.root, engines=1, steps=60, save_every=1000)
    run.submit(replace(plan, slurm=replace(plan.slurm, partition="low")))
    run.wait_steps(5)
    node = hosts_of(run)[0]
    clock = Clock.started()
    high = lab.call(
        *("sbatch", "--parsable", "--partition=high", "--exclusive", f"--nodelist={node}"),
        *("--output=/dev/null", "--wrap=sleep 3"),
    ).strip()
    run.wait(lambda: (run.attempts()[0] / "STOPPED").exists(), "the save")
    detected = clock.now()
    run.wait(lambda: run.slurm(high)["JobState"] in ("RUNNING", "COMPLETED"), "the other job")
    assert run.wait_finished() == "COMPLETED"
    assert run.wait_finished(high) == "COMPLETED"
    assert len(run.attempts()) == 2
    require_each_once(run, 60)
    resumed = clock.until(first_step_of(run, 2))
    outcome = "saved in the grace time, gave way, resumed at the same step"
    fault_table.add(Fault("preemption", "stand-in", detected, resumed, 0, outcome=outcome))
