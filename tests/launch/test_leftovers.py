"""A local run leaves no process behind, however it ends."""

import pytest
from credit_launch.processes import descendants, is_alive
from launch.local_runs import LocalRun, gone, rollout, trainer, wait_for


def pids_of(run):
    wait_for(lambda: run.has("pids") and len((run.root / "pids").read_text().split()) == 2)
    return [int(pid) for pid in (run.root / "pids").read_text().split()]


@pytest.mark.parametrize("end", ["kill", "stop-now", "terminate", "done"])
def test_nothing_is_left(tmp_path, end):
    leader = trainer("done_when", "finished") if end == "done" else trainer("ignore_stop")
    run = LocalRun(tmp_path, leader, rollout("family")).start()
    pids = pids_of(run)
    if end != "done":
        pids.append(int(run.wait_mark("started")))
    below = [*descendants(run.process.pid), *pids]
    assert all(is_alive(pid) for pid in pids)
    if end == "kill":
        run.kill()
    elif end == "terminate":
        run.process.terminate()
        run.files.stop_now.touch()
        assert run.wait() in (0, 143)
    elif end == "stop-now":
        run.files.stop.touch()
        run.files.stop_now.touch()
        assert run.wait() == 0
    else:
        (tmp_path / "finished").touch()
        assert run.wait() == 0
    wait_for(lambda: gone(below))
