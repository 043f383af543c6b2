"""The files by which the trainer of a launched run speaks to its supervisor."""

import errno
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed

from megatron_credit.mcore.exchange import is_lost_peer
from megatron_credit.rollouts.errors import EngineError
from megatron_credit.trainer.launched_attempt import (
    Failure,
    LaunchedAttempt,
    Superseded,
    can_be_tried_again,
)
from megatron_credit.trainer.place import read_place
from megatron_credit.trainer.worker_environment import LaunchVariables, launch_variables

TOPOLOGY = {
    "run": "/shared/run",
    "attempt": 3,
    "job": "17",
    "local": False,
    "port": 10272,
    "engines": "/shared/run/launch/attempt-003/engines",
    "tasks": {
        "trainer": {
            "role": "trainer",
            "nodes": [{"name": "n2", "address": "n2-ib"}, {"name": "n4", "address": "n4-ib"}],
        },
        "rollout-0": {"role": "rollout", "nodes": [{"name": "n1", "address": "n1-ib"}]},
    },
}


@pytest.fixture
def attempt(tmp_path):
    directory = tmp_path / "launch" / "attempt-003"
    directory.mkdir(parents=True)
    (directory / "topology.json").write_text(json.dumps(TOPOLOGY))
    (tmp_path / "launch" / "current").write_text("3")
    return LaunchedAttempt(directory)


def test_the_first_failure_stands(attempt):
    failures = [Failure(f"reason {k}", retry=bool(k % 2), rank=k) for k in range(20)]
    attempt.report(failures[4])
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(attempt.report, failures))
    assert json.loads(attempt.failure.read_text()) == {
        "reason": "reason 4",
        "retry": False,
        "task": "trainer",
        "rank": 4,
        "phase": None,
    }
    left = sorted(path.name for path in attempt.directory.iterdir())
    assert left == ["failure.json", "topology.json"]


def test_an_attempt_that_was_replaced_must_not_go_on(attempt):
    attempt.require_current()
    (attempt.directory.parent / "current").write_text("4")
    with pytest.raises(Superseded, match="attempt 4 of this run was started while attempt 3"):
        attempt.require_current()


def test_the_end_is_said_in_files(attempt):
    attempt.write_stopped(12)
    assert json.loads((attempt.directory / "STOPPED").read_text()) == {"step": 12}
    attempt.write_done()
    assert (attempt.directory.parent / "DONE").exists()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), False),
        (OSError(errno.EIO, "Input/output error"), True),
        (ValueError("trainer.steps=0"), False),
        (EngineError("the engine died"), True),
        (RuntimeError("CUDA error"), True),
    ],
)
def test_what_is_worth_another_attempt(error, expected):
    assert can_be_tried_again(error) is expected


def test_a_lost_peer_is_no_cause():
    gloo = "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:37212"
    assert is_lost_peer(RuntimeError(gloo))
    assert is_lost_peer(torch.distributed.DistNetworkError("the client socket has timed out"))
    assert not is_lost_peer(EngineError(f"weight sync: the engine did not take them: {gloo}"))
    assert not is_lost_peer(RuntimeError("CUDA error: an illegal memory access"))


def test_a_task_knows_its_place(attempt):
    place = read_place(LaunchVariables(attempt.directory, "trainer", "n4"))
    assert (place.run, place.number, place.port) == (Path("/shared/run"), 3, 10272)
    assert (place.node_rank, place.leads) == (1, False)
    assert (place.address, place.master_address) == ("n4-ib", "n2-ib")
    assert place.nodes == ("n2", "n4") and not place.is_local
    with pytest.raises(ValueError, match="node n1 is none of n2, n4, the nodes of trainer"):
        read_place(LaunchVariables(attempt.directory, "trainer", "n1"))


def test_variables_of_a_task():
    given = {"CREDIT_ATTEMPT": "/a", "CREDIT_TASK": "rollout-1", "SLURMD_NODENAME": "n7"}
    assert launch_variables(given) == LaunchVariables(Path("/a"), "rollout-1", "n7")
    assert launch_variables(given | {"CREDIT_NODE": "local2"}).node == "local2"
    with pytest.raises(ValueError, match="CREDIT_TASK is not set: this program is a task of"):
        launch_variables({"CREDIT_ATTEMPT": "/a", "SLURMD_NODENAME": "n7"})
