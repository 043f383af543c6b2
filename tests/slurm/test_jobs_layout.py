"""Layout `jobs`: engines in jobs of their own, which come and go beside the trainer's."""

from dataclasses import replace

import pytest
from credit_launch.files import read_json
from slurm.faults import Fault
from slurm.runs import FINISHED, Clock, new_run, stand_in_plan

NOT_FOR_ENGINES = 'test -z "$SLURM_ARRAY_TASK_ID"'
pytestmark = [pytest.mark.slurm, pytest.mark.beside]


def array_jobs(run, array):
    """State and nodes of each job of the array that Slurm still lists, by its number in it."""
    text = run.lab.call("squeue", "-h", "-r", "-j", array, "-t", "all", "-o", "%K %T %N")
    rows = [line.split() for line in text.splitlines()]
    return {row[0]: (row[1], row[2] if len(row) > 2 else "") for row in rows}


def jobs_run(lab, name, *, preflight="", **options):
    """A run whose engines are an array of jobs; `preflight` may name the run as RUN."""
    run = new_run(lab, name)
    check = ("bash", "-c", preflight.replace("RUN", str(run.root))) if preflight else ()
    run.submit(replace(stand_in_plan(run.root, **options), layout="jobs", preflight=check))
    return run, run.json("job.json")["rollout_job"]


def test_a_lost_engine_job_comes_back_and_the_trainer_never_notices(lab, fault_table):
    run, array = jobs_run(lab, "jobs", rollouts=2, engines=2, steps=100, seconds=0.5)
    run.wait_steps(3)
    jobs = array_jobs(run, array)
    assert {state for state, _ in jobs.values()} == {"RUNNING"} and sorted(jobs) == ["0", "1"]
    (trainer,) = run.topology()["trainer"]
    node = jobs["1"][1]
    assert len({trainer, *(host for _, host in jobs.values())}) == 3
    clock = Clock.started()
    lab.crash(node)
    run.wait(lambda: array_jobs(run, array)["1"][0] != "RUNNING", "Slurm to notice")
    detected = clock.now()
    again = run.wait(
        lambda: [
            row["time"]
            for row in run.lines("seen.jsonl")
            if row["task"] == "rollout-1" and row["time"] > clock.start
        ],
        "the engine's second start",
    )
    lab.revive(node)
    assert run.wait_finished() == "COMPLETED"
    assert run.steps() == list(range(1, 101)) and len(run.attempts()) == 1
    ended = lambda: {state for state, _ in array_jobs(run, array).values()} <= set(FINISHED)  # noqa: E731
    run.wait(ended, "the end of the array")
    outcome = "engine's job queued again by Slurm, trainer untouched"
    fault_table.add(
        Fault(
            "power off: engine node, layout jobs",
            "stand-in",
            detected,
            clock.until(again[0]),
            0,
            outcome=outcome,
        )
    )


def test_engine_jobs_outlive_an_attempt_of_the_trainer_and_end_with_the_run(lab):
    run, array = jobs_run(lab, "jobs-crash", rollouts=1, engines=1, steps=40, save_every=5)
    run.wait_steps(7)
    (node,) = run.topology()["trainer"]
    assert lab.kill(node, "stand_in.py train")
    assert run.wait_finished() == "COMPLETED"
    assert len(run.attempts()) == 2 and set(run.steps()) == set(range(1, 41))
    run.wait(
        lambda: {state for state, _ in array_jobs(run, array).values()} <= set(FINISHED),
        "the end of the array",
    )
    starts = [row for row in run.lines("seen.jsonl") if row["task"] == "rollout-0"]
    assert len(starts) == 1
    run.wait(lambda: not run.processes(starts[0]["node"]), "the engine's end")


def test_an_engine_job_leaves_a_bad_node_to_itself(lab, fault_table):
    """The first that it is on."""
    once = (
        f"{NOT_FOR_ENGINES} && exit 0; "
        "mkdir RUN/bad 2> /dev/null && echo $SLURMD_NODENAME > RUN/bad/node; "
        'test "$(cat RUN/bad/node)" != $SLURMD_NODENAME'
    )
    clock = Clock.started()
    run, _ = jobs_run(lab, "jobs-bad", preflight=once, rollouts=1, engines=1, steps=10)
    (successor,) = run.wait(
        lambda: [path.read_text().strip() for path in run.launch.glob("rollout-0/successor")],
        "the engine job's successor",
    )
    assert run.wait_finished() == "COMPLETED"
    bad = (run.root / "bad/node").read_text().strip()
    assert run.slurm(successor)["ExcNodeList"] == bad
    (start,) = [row for row in run.lines("seen.jsonl") if row["task"] == "rollout-0"]
    assert start["node"] != bad and len(run.attempts()) == 1
    run.wait(lambda: run.slurm(successor)["JobState"] in FINISHED, "the end of the successor")
    run.wait(lambda: not run.processes(start["node"]), "the engine's end")
    outcome = "successor of the engine's job without that node, trainer untouched"
    fault_table.add(
        Fault(
            "engine node fails its check, layout jobs",
            "stand-in",
            None,
            clock.until(start["time"]),
            0,
            outcome=outcome,
        )
    )


def test_engine_jobs_that_no_node_suits_do_not_try_them_all(lab):
    """Three nodes are enough to see that it is not them."""
    check = f"{NOT_FOR_ENGINES} || {{ echo no driver; exit 1; }}"
    run, _ = jobs_run(lab, "jobs-none", preflight=check, rollouts=1, engines=1)
    home = run.launch / "rollout-0"
    run.wait(lambda: read_json(home / "status.json").get("state") == "gave-up", "the engine's end")
    why = read_json(home / "status.json")["why"]
    assert "no node passes the checks" in why and "no driver" in why
    assert len((home / "bad-nodes").read_text().split()) == 2
    lab.call("scancel", run.job)
    assert run.wait_finished() == "CANCELLED"
