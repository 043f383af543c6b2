"""Nodes that lose power or their cable; Slurm notices after 10 s here, on sites after 5 min."""

from dataclasses import replace

import pytest
from slurm.faults import Fault
from slurm.runs import Clock, new_run, stand_in_plan, started_run

pytestmark = [pytest.mark.slurm, pytest.mark.beside]

STEPS = 120
"""Of half a second: the run must not be over when Slurm notices."""


def rows_of(run, attempt):
    """The steps of an attempt, with node and time."""
    return [row for row in run.lines("steps.jsonl") if row["attempt"] == attempt]


def noticed(run, clock):
    """Seconds until the job left its state RUNNING."""
    run.wait(
        lambda: run.slurm()["JobState"] != "RUNNING" or run.slurm()["Restarts"] != "0",
        "Slurm to notice",
    )
    return clock.now()


def finish(run, clock, *, detected, fault, table):
    """The run ends well on other nodes; its row."""
    assert run.wait_finished() == "COMPLETED"
    assert len(run.attempts()) == 2 and run.slurm()["Restarts"] == "1", run.story()
    assert set(run.steps()) == set(range(1, STEPS + 1))
    second = run.steps(attempt=2)
    assert second == list(range(second[0], STEPS + 1))
    resumed = clock.until(rows_of(run, 2)[0]["time"])
    outcome = "queued again by Slurm, resumed on other nodes from the checkpoint"
    table.add(Fault(fault, "stand-in", detected, resumed, run.steps_repeated(), outcome=outcome))


@pytest.mark.parametrize("which", [0, 1], ids=["first", "second"])
def test_a_trainer_node_without_power(lab, fault_table, which):
    run = started_run(
        lab, f"power-{which}", trainer_nodes=2, engines=1, steps=STEPS, seconds=0.5, save_every=3
    )
    run.wait_steps(5)
    node = run.topology()["trainer"][which]
    clock = Clock.started()
    lab.crash(node)
    detected = noticed(run, clock)
    run.wait_steps(1, attempt=2)
    assert node not in [host for hosts in run.topology(2).values() for host in hosts]
    lab.revive(node)
    place = ("first node of the job", "a trainer node")[which]
    finish(run, clock, detected=detected, fault=f"power off: {place}", table=fault_table)


def test_the_node_of_the_only_engine_without_power(lab, fault_table):
    run = started_run(lab, "power-engine", engines=1, steps=STEPS, seconds=0.5, save_every=3)
    run.wait_steps(5)
    (node,) = run.topology()["rollout-0"]
    clock = Clock.started()
    lab.crash(node)
    detected = noticed(run, clock)
    run.wait_steps(1, attempt=2)
    lab.revive(node)
    finish(run, clock, detected=detected, fault="power off: engine node", table=fault_table)


@pytest.mark.parametrize("which", [0, 1], ids=["first", "second"])
def test_a_pulled_cable_leaves_no_orphan_that_writes(lab, fault_table, which):
    run = started_run(
        lab, f"cable-{which}", trainer_nodes=2, engines=1, steps=STEPS, seconds=0.5, save_every=3
    )
    run.wait_steps(5)
    node = run.topology()["trainer"][which]
    clock = Clock.started()
    lab.unplug(node)
    detected = noticed(run, clock)
    assert run.processes(node)
    run.wait_steps(3, attempt=2)
    states_before = run.status()
    lab.plug(node)
    run.wait(lambda: not run.processes(node), "the orphans' end")
    place = ("first node of the job", "a trainer node")[which]
    finish(run, clock, detected=detected, fault=f"cable pulled: {place}", table=fault_table)
    # The old first node still saw the shared files; it must not have used that.
    assert states_before["attempt"] == 2
    assert run.status()["attempt"] == 2 and run.status()["state"] == "done"
    start = rows_of(run, 2)[0]["time"]
    late = [row for row in rows_of(run, 1) if row["time"] > start]
    assert late == []


def test_a_hot_spare_takes_the_place_of_a_lost_engine_node(lab, fault_table):
    run = new_run(lab, "hot-spare")
    plan = stand_in_plan(run.root, rollouts=2, engines=2, steps=80, seconds=0.5, save_every=1000)
    run.submit(replace(plan, hot_spares=True, spare_nodes=1))
    run.wait_steps(3)
    (node,) = run.topology()["rollout-1"]
    clock = Clock.started()
    lab.crash(node)
    run.wait(lambda: node not in run.topology()["rollout-1"], "the move")
    detected = clock.now()
    (spare,) = run.topology()["rollout-1"]
    moved = run.wait(
        lambda: [row["time"] for row in run.lines("seen.jsonl") if row["node"] == spare],
        "the engine on the spare",
    )
    lab.revive(node)
    assert run.wait_finished() == "COMPLETED"
    assert run.steps() == list(range(1, 81))
    assert len(run.attempts()) == 1 and run.slurm()["Restarts"] == "0"
    outcome = "engine moved to the spare, trainer untouched"
    fault_table.add(
        Fault(
            "power off: engine node, hot spare",
            "stand-in",
            detected,
            clock.until(moved[0]),
            0,
            outcome=outcome,
        )
    )


def test_with_hot_spares_the_first_nodes_loss_still_queues_the_job_again(lab, fault_table):
    run = new_run(lab, "lease")
    plan = stand_in_plan(run.root, engines=1, steps=STEPS, seconds=0.5, save_every=3)
    limits = replace(plan.limits, lease_seconds=20)
    run.submit(replace(plan, hot_spares=True, spare_nodes=1, limits=limits))
    run.wait_steps(5)
    (node,) = run.topology()["trainer"]
    clock = Clock.started()
    lab.crash(node)
    run.wait(lambda: run.slurm()["Restarts"] == "1", "the nodes to queue the job again")
    detected = clock.now()
    run.wait_steps(1, attempt=2)
    lab.revive(node)
    fault = "power off: first node, hot spares"
    finish(run, clock, detected=detected, fault=fault, table=fault_table)


def test_with_hot_spares_a_lost_trainer_node_still_ends_the_attempt(lab, fault_table):
    run = new_run(lab, "hot-trainer")
    options = {"trainer_nodes": 2, "engines": 1, "steps": STEPS, "seconds": 0.5, "save_every": 3}
    plan = stand_in_plan(run.root, **options)
    run.submit(replace(plan, hot_spares=True, spare_nodes=1))
    run.wait_steps(5)
    node = run.topology()["trainer"][1]
    clock = Clock.started()
    lab.crash(node)
    run.wait(lambda: run.slurm()["Restarts"] == "1", "the attempt's end")
    detected = clock.now()
    run.wait_steps(1, attempt=2)
    assert node not in [host for hosts in run.topology(2).values() for host in hosts]
    lab.revive(node)
    fault = "power off: a trainer node, hot spares"
    finish(run, clock, detected=detected, fault=fault, table=fault_table)
