"""Who is told that the kernel ended a process for lack of memory, and for how long."""

import json

import pytest

from megatron_credit import memory_kills
from megatron_credit.memory_kills import RECENT_S, MemoryKills
from megatron_credit.trainer import node
from megatron_credit.trainer.launched_attempt import LaunchedAttempt
from megatron_credit.trainer.place import Place
from megatron_credit.trainer.run_directory import RunDirectory

ROOT_CAUSE = """
Root Cause (first observed failure):
[0]:
  time      : 2026-11-30_18:53:57
  host      : node7
  rank      : 3 (local_rank: 1)
  exitcode  : -9 (pid: 4711)
"""


class Kernel:
    """Its counter, and the clock."""

    def __init__(self, path):
        self.now = 100.0
        self._path = path
        self.kills(0)

    def kills(self, number):
        self._path.write_text(f"nr_free_pages 5\noom_kill {number}\noom_kill_other 7\n")


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    kernel = Kernel(tmp_path / "vmstat")
    monkeypatch.setattr(memory_kills, "VMSTAT", tmp_path / "vmstat")
    monkeypatch.setattr(memory_kills.time, "monotonic", lambda: kernel.now)
    return kernel


def test_only_the_last_seconds_count(kernel):
    kernel.kills(4)
    kills = MemoryKills()
    assert kills.just_now() == ""
    kernel.kills(5)
    assert kills.just_now().startswith("the kernel ended a process of this machine")
    kernel.now += RECENT_S
    kills.look()
    assert kills.just_now()
    kernel.kills(7)
    assert "3 processes" in kills.just_now()
    kernel.now += RECENT_S
    kills.look()
    assert "2 processes" in kills.just_now()
    for _ in range(2):
        kills.look()  # too early to forget anything
        kernel.now += RECENT_S
        kills.look()
    assert kills.just_now() == ""


def test_a_kernel_that_does_not_count(kernel, tmp_path):
    (tmp_path / "vmstat").unlink()
    assert MemoryKills().just_now() == ""


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_was_killed_for_its_memory(kernel, tmp_path, killed):
    directory = RunDirectory(tmp_path / "run")
    directory.logs.mkdir(parents=True)
    (directory.logs / "torchrun-1.log").write_text(ROOT_CAUSE)
    attempt = LaunchedAttempt(tmp_path / "attempt-001")
    attempt.directory.mkdir()
    place = Place(
        run=directory.root,
        attempt=attempt.directory,
        number=1,
        task="trainer",
        nodes=("n2", "n4"),
        addresses=("n2", "n4"),
        node_rank=1,
        port=10000,
        engines=attempt.directory / "engines",
        is_local=False,
    )
    kills = MemoryKills()
    kernel.kills(killed)
    node.report_ranks(attempt, place, directory, 1, kills)
    failure = json.loads(attempt.failure.read_text())
    assert failure["retry"] and failure["rank"] == 3
    assert failure["reason"].startswith("rank 3 on node n4 was ended by SIGKILL; ")
    assert ("lack of memory" in failure["reason"]) == bool(killed)
