"""`status`, `logs`, `stop`, and a second `launch`, on live jobs."""

import json

import pytest
from slurm.faults import Fault
from slurm.runs import Clock, started_run
from slurm.whole import CONFIG, cli

pytestmark = [pytest.mark.slurm, pytest.mark.beside]


def shown(result):
    """What a command said, in one line."""
    assert result.returncode == 0, result.stdout + result.stderr
    return " ".join(result.stdout.split())


def test_status_and_logs_of_a_live_run_and_a_second_launch_is_refused(lab):
    run = started_run(lab, "watched", engines=1, steps=2000, save_every=3)
    run.wait_steps(4)
    topology = run.topology()
    text = shown(cli(lab, "status", str(run.root)))
    assert f"job {run.job} RUNNING" in text and "state running" in text
    assert f"trainer {topology['trainer'][0]}" in text
    assert f"rollout-0 {topology['rollout-0'][0]}" in text
    found = json.loads(cli(lab, "status", str(run.root), "--json").stdout)
    assert found["alive"] and found["attempts"] == 1 and found["checkpoint"] >= 3
    (engine,) = topology["rollout-0"]
    text = shown(cli(lab, "logs", str(run.root), "--task", "rollout-0"))
    assert f"rollout-0 begins on {engine}" in text and "trainer begins" not in text
    refused = cli(lab, "launch", "slurm", str(CONFIG), "--set", f"run.directory={run.root}")
    words = " ".join((refused.stdout + refused.stderr).split())
    assert refused.returncode == 2 and f"job {run.job}, which is RUNNING" in words
    assert run.json("job.json")["job"] == run.job and run.slurm()["JobState"] == "RUNNING"
    lab.call("scancel", run.job)
    assert run.wait_finished() == "CANCELLED"
    text = shown(cli(lab, "status", str(run.root)))
    assert "cancelled" in text and f"job {run.job} not in the queue" in text


def test_stop_saves_and_the_run_stays_stopped(lab, fault_table):
    run = started_run(lab, "stop", trainer_nodes=2, engines=1, steps=2000, save_every=2000)
    run.wait_steps(5)
    clock = Clock.started()
    assert "will not be queued again" in shown(cli(lab, "stop", str(run.root)))
    assert run.wait_finished() == "COMPLETED"
    ended = clock.now()
    assert run.status()["state"] == "stopped" and len(run.attempts()) == 1
    saved = run.json("attempt-001/STOPPED")["step"]
    assert int((run.launch / "progress").read_text()) == saved == run.steps()[-1]
    assert not (run.launch / "DONE").exists() and run.slurm()["Restarts"] == "0"
    assert "nothing to stop" in shown(cli(lab, "stop", str(run.root)))
    outcome = "saved, stays stopped"
    fault_table.add(Fault("user's stop", "stand-in", ended, None, 0, outcome=outcome))


def test_stop_now_does_not_wait_for_a_step(lab):
    run = started_run(lab, "stop-now", engines=1, steps=2, seconds=1000)
    run.wait_state("running")
    assert f"cancelled job {run.job}" in shown(cli(lab, "stop", str(run.root), "--now"))
    assert run.wait_finished() == "CANCELLED"
    assert len(run.attempts()) == 1 and run.slurm()["Restarts"] == "0"
