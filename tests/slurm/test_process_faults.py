"""A process dies, or a node is no good, while Slurm sees nothing wrong."""

from dataclasses import replace

import pytest
from slurm.faults import Fault
from slurm.runs import Clock, new_run, stand_in_plan, started_run

pytestmark = [pytest.mark.slurm, pytest.mark.beside]

TRAIN = "stand_in.py train"
NAME_ITSELF = 'echo $SLURMD_NODENAME > "{}/bad/node"'


def with_preflight(plan, script, spares=0, seconds=20):
    """The plan with a check of the user's, a line of shell."""
    limits = replace(plan.limits, preflight_seconds=seconds)
    return replace(plan, preflight=("bash", "-c", script), spare_nodes=spares, limits=limits)


def first_step_of(run, attempt):
    """When the attempt did its first step."""
    return next(row["time"] for row in run.lines("steps.jsonl") if row["attempt"] == attempt)


def test_a_crashed_engine_is_started_again_beside_an_untouched_trainer(lab, fault_table):
    run = started_run(lab, "engine-crash", rollouts=2, engines=2, steps=60)
    run.wait_steps(3)
    (node,) = run.topology()["rollout-0"]
    clock = Clock.started()
    assert lab.kill(node, "stand_in.py sample")
    starts = run.wait(
        lambda: [
            row["time"]
            for row in run.lines("seen.jsonl")
            if row["task"] == "rollout-0" and row["time"] > clock.start
        ],
        "the engine's second start",
    )
    assert run.wait_finished() == "COMPLETED"
    assert run.steps() == list(range(1, 61)) and len(run.attempts()) == 1
    started = [row["task"] for row in run.lines("seen.jsonl")]
    assert sorted(started) == ["rollout-0", "rollout-0", "rollout-1", "trainer"]
    delay = clock.until(starts[0])
    assert delay < 30
    outcome = "engine's task started again, trainer untouched"
    fault_table.add(Fault("engine task killed", "stand-in", delay, delay, 0, outcome=outcome))


def test_an_engine_that_keeps_crashing_ends_the_attempt_and_not_the_other_engines(lab):
    run = new_run(lab, "engine-bad")
    plan = stand_in_plan(run.root, rollouts=1, engines=2, steps=10)
    trainer, rollout = plan.roles
    broken = replace(rollout, command=("bash", "-c", "echo the engine is broken; exit 7"))
    limits = replace(plan.limits, max_no_progress=1)
    run.submit(replace(plan, roles=(trainer, replace(broken, max_restarts=2)), limits=limits))
    assert run.wait_finished() == "FAILED"
    assert run.status()["state"] == "gave-up" and "the engine is broken" in run.status()["why"]
    (node,) = run.topology()["rollout-0"]
    assert run.log("rollout-0", node).count("the engine is broken") == 3
    run.wait(lambda: not run.processes(node), "the end of the engines")


@pytest.mark.parametrize("where", ["first", "second"])
def test_a_crashed_trainer_rank_ends_the_attempt_and_the_next_one_goes_on(lab, fault_table, where):
    index = ("first", "second").index(where)
    run = started_run(lab, f"trainer-{where}", trainer_nodes=2, engines=1, steps=40, save_every=5)
    run.wait_steps(7)
    nodes = run.topology()["trainer"]
    other = nodes[1 - index]

    def alive():
        lines = run.processes(other)
        return [line for line in lines if TRAIN in line and not line.startswith("srun")]

    assert len(alive()) == 1
    clock = Clock.started()
    assert len(lab.kill(nodes[index], TRAIN)) == 1
    run.wait(lambda: not alive(), "the other rank's end")
    detected = clock.now()
    assert detected < 10
    run.wait_steps(1, attempt=2)
    assert run.wait_finished() == "COMPLETED"
    assert run.slurm()["Restarts"] == "1" and len(run.attempts()) == 2
    first = run.steps(attempt=1)
    saved = first[-1] - first[-1] % 5
    assert first == list(range(1, first[-1] + 1)) and first[-1] >= 7
    assert run.steps(attempt=2) == list(range(saved + 1, 41))
    resumed = clock.until(first_step_of(run, 2))
    fault_table.add(
        Fault(
            f"trainer's process killed on its {where} node",
            "stand-in",
            detected,
            resumed,
            run.steps_repeated(),
            outcome="attempt ended, queued again, resumed from the checkpoint",
        )
    )


def test_no_progress_twice_gives_up_with_the_reason(lab, fault_table):
    run = new_run(lab, "no-progress")
    clock = Clock.started()
    run.submit(stand_in_plan(run.root, engines=1, steps=20, crash_at=4, save_every=3))
    assert run.wait_finished() == "FAILED"
    # The first attempt saved step 3, the next two failed at step 4 and saved nothing.
    assert [run.steps(attempt) for attempt in (1, 2, 3)] == [[1, 2, 3], [], []]
    assert len(run.attempts()) == 3
    status = run.status()
    assert status["state"] == "gave-up"
    assert "without a new checkpoint" in status["why"] and "told to crash" in status["why"]
    outcome = "gave up after 2 attempts without a checkpoint, with the end of the trainer's log"
    fault_table.add(
        Fault("trainer crashes at each start", "stand-in", clock.now(), None, 0, outcome=outcome)
    )


def test_a_failure_that_no_retry_can_mend_is_final(lab, fault_table):
    run = new_run(lab, "final")
    plan = stand_in_plan(run.root, engines=1, steps=20)
    reason = "the disk of the run directory is full"
    trainer = replace(plan.roles[0], command=(*plan.roles[0].command, "--refuse", reason))
    clock = Clock.started()
    run.submit(replace(plan, roles=(trainer, plan.roles[1])))
    assert run.wait_finished() == "FAILED"
    assert len(run.attempts()) == 1 and run.steps() == []
    assert run.status()["state"] == "gave-up" and reason in run.status()["why"]
    outcome = "gave up at once with the reason"
    fault_table.add(
        Fault(
            "trainer says that no retry helps (full disk)",
            "stand-in",
            clock.now(),
            None,
            0,
            outcome=outcome,
        )
    )


def test_a_node_that_fails_its_check_is_replaced_by_a_spare(lab, fault_table):
    run = new_run(lab, "spare")
    plan = stand_in_plan(run.root, engines=1, steps=5)
    # Who makes the directory first is the bad one.
    once = (
        f'! mkdir "{run.root}/bad" || {{ echo $SLURMD_NODENAME > "{run.root}/bad/node"; exit 1; }}'
    )
    clock = Clock.started()
    run.submit(with_preflight(plan, once, spares=1))
    assert run.wait_finished() == "COMPLETED"
    bad = (run.root / "bad/node").read_text().strip()
    used = [host for hosts in run.topology().values() for host in hosts]
    assert len(used) == 2 and bad not in used and len(run.attempts()) == 1
    assert run.steps() == [1, 2, 3, 4, 5]
    resumed = clock.until(first_step_of(run, 1))
    fault_table.add(
        Fault(
            "node fails its check, spare there", "stand-in", None, resumed, 0, outcome="spare used"
        )
    )


def test_a_node_that_hangs_in_its_check_is_replaced_by_a_spare(lab, fault_table):
    run = new_run(lab, "hang")
    plan = stand_in_plan(run.root, engines=1, steps=5)
    once = f'! mkdir "{run.root}/bad" || {{ {NAME_ITSELF.format(run.root)}; sleep 999; }}'
    clock = Clock.started()
    run.submit(with_preflight(plan, once, spares=1, seconds=5))
    assert run.wait_finished() == "COMPLETED"
    bad = (run.root / "bad/node").read_text().strip()
    used = [host for hosts in run.topology().values() for host in hosts]
    assert len(used) == 2 and bad not in used and len(run.attempts()) == 1
    run.wait(
        lambda: not any("sleep 999" in line for line in lab.processes(bad)), "the end of what hung"
    )
    resumed = clock.until(first_step_of(run, 1))
    fault_table.add(
        Fault(
            "node hangs in its check",
            "stand-in",
            None,
            resumed,
            0,
            outcome="spare used after the check's time limit of 5 s",
        )
    )


def test_without_a_spare_a_successor_job_avoids_the_bad_node(lab, fault_table):
    run = new_run(lab, "successor")
    plan = stand_in_plan(run.root, engines=1, steps=5)
    once = (
        f'mkdir "{run.root}/bad" 2> /dev/null && echo $SLURMD_NODENAME > "{run.root}/bad/node"; '
        f'test "$(cat "{run.root}/bad/node")" != "$SLURMD_NODENAME"'
    )
    clock = Clock.started()
    run.submit(with_preflight(plan, once))
    first = run.job
    run.wait(lambda: run.json("job.json")["job"] != first, "the successor")
    second = run.json("job.json")["job"]
    assert run.wait_finished(second) == "COMPLETED"
    bad = (run.root / "bad/node").read_text().strip()
    assert run.slurm(second)["ExcNodeList"] == bad
    assert run.slurm(first)["JobState"] == "COMPLETED"
    used = [host for hosts in run.topology(2).values() for host in hosts]
    assert bad not in used and run.steps() == [1, 2, 3, 4, 5]
    resumed = clock.until(first_step_of(run, 2))
    outcome = "successor job without that node"
    fault_table.add(
        Fault("node fails its check, no spare", "stand-in", None, resumed, 0, outcome=outcome)
    )
