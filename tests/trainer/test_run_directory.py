"""The files of a run: metrics that survive kills, locks, checkpoints that are pruned."""

import json
import subprocess
import sys

import pytest

from megatron_credit.trainer.metrics import MetricsLog, read_metrics
from megatron_credit.trainer.run_directory import RunDirectory, checkpoint_step


def make(path):
    directory = RunDirectory(path)
    directory.create()
    return directory


def test_metrics_are_kept_up_to_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, [], last_step=0)
    for step in range(5):
        log.write(step, {"reward/mean": step / 10})
    log.close()
    with path.open("a") as lines:
        lines.write('{"step": 5, "reward/me')  # a kill in the middle of a write
    assert [record["step"] for record in read_metrics(path)] == [0, 1, 2, 3, 4]
    log = MetricsLog(path, [], last_step=2)
    log.write(3, {"reward/mean": 9.0})
    log.close()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(record["step"], record["reward/mean"]) for record in records] == [
        (0, 0.0),
        (1, 0.1),
        (2, 0.2),
        (3, 9.0),
    ]


def test_a_second_run_is_refused_while_the_first_or_its_children_live(tmp_path):
    directory = make(tmp_path)
    lock = directory.lock()
    with pytest.raises(ValueError, match=r"another run .process [0-9]+. is at work"):
        directory.lock()
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock.fileno(),)
    )
    lock.close()
    with pytest.raises(ValueError, match="another run"):
        directory.lock()
    child.communicate(b"\n")
    directory.lock().close()


def test_only_complete_checkpoints_count_and_old_ones_go(tmp_path):
    directory = make(tmp_path)
    for step in (10, 20, 30):
        directory.checkpoint(step).mkdir()
    (directory.checkpoints / ".step-000040.unfinished").mkdir()
    assert directory.checkpoint_steps() == [10, 20, 30]
    directory.prune_checkpoints(keep_last=2)
    assert sorted(path.name for path in directory.checkpoints.iterdir()) == [
        "step-000020",
        "step-000030",
    ]


def test_checkpoint_names(tmp_path):
    path = tmp_path / "step-000123"
    path.mkdir()
    assert checkpoint_step(path) == 123
    for wrong in (tmp_path / "step-000124", tmp_path):
        with pytest.raises(ValueError, match="is not a checkpoint directory"):
            checkpoint_step(wrong)


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be created"):
        RunDirectory(tmp_path / "file" / "run").create()


def test_status_is_replaced_whole(tmp_path):
    directory = make(tmp_path)
    assert directory.read_status() == {}
    directory.write_status({"step": 1})
    directory.write_status({"step": 2})
    assert directory.read_status() == {"step": 2}
