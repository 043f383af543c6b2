"""How attempts end, and what follows: the supervisor itself, on this machine, with stand-ins."""

import json
import signal

import pytest
from credit_launch.plan import Limits, Role
from credit_launch.ports import USUAL_FLOOR
from credit_launch.processes import is_alive
from launch.local_runs import PATIENCE_S, LocalRun, act, rollout, trainer, wait_for


def test_a_run_that_is_done(tmp_path):
    judge = Role("judge", act("serve", "{port}"), serves=True, max_restarts=1)
    names = ("CREDIT_TASK", "CREDIT_NODE", "CREDIT_ATTEMPT", "CREDIT_SERVICE_JUDGE", "COLOUR")
    run = LocalRun(
        tmp_path / "a run",
        trainer("done_when", "served", nodes=2),
        rollout("tell", *names),
        judge,
        spare_nodes=1,
        environment=(("COLOUR", "dark blue"),),
    )
    assert run.run() == 0
    assert (run.status["state"], run.status["attempt"], run.status["job"]) == ("done", 1, None)
    attempt = run.files.attempts()[0]
    assert run.files.latest.resolve() == attempt.root
    assert run.files.current.read_text() == "1\n"
    topology = json.loads(attempt.topology.read_text())
    hosts = {name: [n["name"] for n in task["nodes"]] for name, task in topology["tasks"].items()}
    assert hosts == {
        "trainer": ["local0", "local1"],
        "rollout-0": ["local2"],
        "judge-0": ["local3"],
    }
    assert topology["local"] and topology["engines"] == str(attempt.engines)
    assert 10000 <= topology["port"] < USUAL_FLOOR
    port = topology["tasks"]["judge-0"]["port"]
    assert run.wait_mark("served") == str(port)
    assert run.has("asked to end")
    assert json.loads(run.wait_mark("variables.json")) == {
        "CREDIT_TASK": "rollout-0",
        "CREDIT_NODE": "local2",
        "CREDIT_ATTEMPT": str(attempt.root),
        "CREDIT_SERVICE_JUDGE": f"http://127.0.0.1:{port}",
        "COLOUR": "dark blue",
    }
    assert (attempt.logs / "trainer.local1.log").read_text() == "trainer on local1: done_when\n"
    # Once more: it stays done.
    assert run.run() == 0
    assert len(run.files.attempts()) == 1
    assert (run.status["state"], run.status["attempt"]) == ("done", 1)


def test_a_failed_attempt_is_tried_again_and_the_reason_is_kept(tmp_path):
    run = LocalRun(tmp_path, trainer("crash_once"))
    assert run.run() == 0
    assert run.ends == ["requeued", "done"]
    end = json.loads(run.files.attempts()[0].end.read_text())
    assert "RuntimeError: the card fell off the bus" in end["why"]
    assert (end["before"], end["after"]) == (-1, 3)


def test_no_progress_gives_up_with_the_reason(tmp_path):
    run = LocalRun(tmp_path, trainer("crash"))
    assert run.run() == 1
    assert run.ends == ["requeued", "gave-up"]
    why = run.status["why"]
    assert why.startswith("2 failed attempts in a row without a new checkpoint")
    assert "the end of" in why and "the card fell off the bus" in why


def test_a_later_launch_begins_to_count_anew(tmp_path):
    run = LocalRun(tmp_path, trainer("crash"))
    assert run.run() == 1
    again = LocalRun(tmp_path, trainer("crash"), first_attempt=3)
    assert again.run() == 1
    assert again.ends == ["requeued", "gave-up"] * 2


def test_what_cannot_be_mended_is_not_tried_again(tmp_path):
    run = LocalRun(tmp_path, trainer("hopeless"))
    assert run.run() == 1
    assert run.ends == ["gave-up"]
    assert run.status["why"] == "the disk is full"


def test_an_exit_code_of_zero_is_no_success(tmp_path):
    limits = Limits(max_attempts=1, grace_seconds=2, preflight_seconds=PATIENCE_S)
    run = LocalRun(tmp_path, trainer("silent"), limits=limits)
    assert run.run() == 1
    assert "1 attempts (launch.max_attempts = 1)" in run.status["why"]
    assert "the trainer ended, and the run is not done" in run.status["why"]


def test_a_node_that_fails_takes_the_others_with_it(tmp_path):
    limits = Limits(max_no_progress=1, grace_seconds=2, preflight_seconds=PATIENCE_S)
    run = LocalRun(tmp_path, trainer("one_node_fails", nodes=2), limits=limits)
    assert run.run() == 1
    assert run.ends == ["gave-up"]


@pytest.mark.parametrize("ask", ["file", "interrupt"])
def test_the_user_stops_it(tmp_path, ask):
    run = LocalRun(tmp_path, trainer("honour_stop"), rollout("ignore_stop")).start()
    run.wait_mark("started")
    if ask == "file":
        run.files.stop.touch()
    else:
        run.signal(signal.SIGINT)
    assert run.wait() == 0
    assert (run.status["state"], run.status["why"]) == ("stopped", "asked by the user")
    assert run.ends == ["stopped"]
    if ask == "file":
        # It stays stopped until somebody launches it again.
        assert run.run() == 0
        assert len(run.files.attempts()) == 1


def test_a_second_interrupt_does_not_wait(tmp_path):
    run = LocalRun(tmp_path, trainer("ignore_stop")).start()
    run.wait_mark("started")
    run.signal(signal.SIGINT)
    wait_for((run.files.root / "attempt-001" / "STOP").exists)
    run.signal(signal.SIGINT)
    assert run.wait() == 0
    assert run.status["why"] == "asked by the user; without waiting for a checkpoint"


def test_a_warning_makes_it_save_and_go_on(tmp_path):
    run = LocalRun(tmp_path, trainer("honour_stop")).start()
    run.wait_mark("started")
    run.signal(signal.SIGUSR1)
    wait_for(lambda: len(run.files.attempts()) == 2)
    run.files.stop.touch()
    assert run.wait() == 0
    assert run.ends == ["requeued", "stopped"]


def test_a_warning_that_is_not_heeded_ends_the_attempt_in_time(tmp_path):
    limits = Limits(warn_seconds=1, max_attempts=1, grace_seconds=1, preflight_seconds=PATIENCE_S)
    run = LocalRun(tmp_path, trainer("ignore_stop"), limits=limits).start()
    run.wait_mark("started")
    run.signal(signal.SIGUSR1)
    assert run.wait() == 1
    assert "took longer than launch.warn_seconds = 1" in run.status["why"]


def test_sigterm_saves_and_never_goes_on(tmp_path):
    run = LocalRun(tmp_path, trainer("honour_stop")).start()
    run.wait_mark("started")
    run.signal(signal.SIGTERM)
    assert run.wait() == 143
    assert run.ends == ["stopping"]
    assert (run.files.attempts()[0].root / "STOPPED").exists()


def test_an_engine_task_that_dies_is_started_again_beside_the_same_trainer(tmp_path):
    run = LocalRun(tmp_path, trainer("done_when", "third life"), rollout("die_twice"))
    assert run.run() == 0
    assert run.ends == ["done"]
    assert "rollout-0 on local1 ended with 7 (2 of 3)" in (run.root / "said").read_text()


def test_the_run_outlives_engine_tasks_as_long_as_one_is_left(tmp_path):
    run = LocalRun(
        tmp_path,
        trainer("done_when", "third life"),
        rollout("die", max_restarts=0),
        Role("sampler", act("die_twice"), max_restarts=3),
    )
    # The only task of its role: the attempt fails.
    assert run.run() == 1
    assert "rollout-0: it ended 1 times" in run.status["why"]
    two = LocalRun(tmp_path / "two", trainer("done_when", "third life"), rollout("die_twice",
        replicas=2, max_restarts=1))  # fmt: skip
    assert two.run() == 0


def test_a_service_that_cannot_be_kept_up_ends_the_attempt(tmp_path):
    judge = Role("judge", act("die"), replicas=2, serves=True, max_restarts=1)
    limits = Limits(max_no_progress=1, grace_seconds=2, preflight_seconds=PATIENCE_S)
    run = LocalRun(tmp_path, trainer("ignore_stop"), judge, limits=limits)
    assert run.run() == 1
    assert "judge-" in run.status["why"] and "it ended 2 times" in run.status["why"]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"needs_module": "no_such_package"}, "cannot import no_such_package"),
        ({"preflight": ("false",)}, "launch.preflight ended with 1: it said nothing"),
        ({"preflight": ("sh", "-c", "echo ECC errors; exit 4")}, "ended with 4: ECC errors"),
        ({"preflight": ("/no/such/program",)}, "launch.preflight: [Errno 2]"),
    ],
)
def test_checks_that_no_node_passes_end_the_run_at_once(tmp_path, fields, why):
    run = LocalRun(tmp_path, trainer("crash"), **fields)
    assert run.run() == 1
    assert run.ends == ["gave-up"]
    assert run.status["why"].startswith("no node passes the checks: local0: ")
    assert why in run.status["why"]


def test_a_check_that_hangs_is_ended_with_its_children(tmp_path):
    check = ("sh", "-c", f"sleep 300 & echo $! > '{tmp_path}/child'; wait")
    limits = Limits(preflight_seconds=1, grace_seconds=2)
    run = LocalRun(tmp_path, trainer("crash"), preflight=check, limits=limits)
    assert run.run() == 1
    assert "launch.preflight took longer than 1 s" in run.status["why"]
    assert not is_alive(int((tmp_path / "child").read_text()))


def test_a_node_that_fails_the_checks_is_made_up_for_by_a_spare(tmp_path):
    check = ("sh", "-c", '[ "$CREDIT_NODE" != local0 ]')
    run = LocalRun(
        tmp_path, trainer("done_when", "go"), rollout("die_twice"), preflight=check, spare_nodes=1
    )
    (tmp_path / "go").touch()
    assert run.run() == 0
    topology = json.loads(run.files.attempts()[0].topology.read_text())
    assert topology["tasks"]["trainer"]["nodes"][0]["name"] == "local1"


def test_a_second_supervisor_is_refused(tmp_path):
    run = LocalRun(tmp_path, trainer("honour_stop")).start()
    run.wait_mark("started")
    second = LocalRun(tmp_path, trainer("honour_stop"))
    assert second.run() == 2
    assert "another supervisor is at work" in (tmp_path / "said").read_text()
    run.files.stop.touch()
    assert run.wait() == 0
