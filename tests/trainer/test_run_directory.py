"""The files of a run: metrics that survive kills, locks, checkpoints that are pruned."""

import errno
import json
import shutil
import subprocess
import sys

import pytest
from batch.test_rollout_files import PLAIN
from mcore.save_checks import mount_small_disk

from megatron_credit.batch.rollout_files import read_rollouts, write_rollouts
from megatron_credit.errors import lasts
from megatron_credit.trainer.config import CheckpointSection
from megatron_credit.trainer.metrics import MetricsLog, read_metrics
from megatron_credit.trainer.run_directory import RunDirectory, checkpoint_step, replace_text


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
    others = ["step-000005.damaged", "notes", "step-000001-mine"]
    for name in (".step-000040.unfinished", ".step-000003.deleted", *others):
        (directory.checkpoints / name).mkdir()
    assert directory.checkpoint_steps() == [10, 20, 30]
    directory.prune_checkpoints(keep_last=2)
    assert sorted(path.name for path in directory.checkpoints.iterdir()) == [
        "notes",
        "step-000001-mine",
        "step-000005.damaged",
        "step-000020",
        "step-000030",
    ]


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [
        (1, 0, [70]),
        (2, 0, [60, 70]),
        (9, 0, [10, 20, 30, 40, 50, 60, 70]),
        (1, 20, [20, 40, 60, 70]),
        (2, 30, [30, 60, 70]),
        (1, 100, [70]),
    ],
)
def test_the_newest_and_those_of_keep_every_stay(tmp_path, keep_last, keep_every, kept):
    directory = make(tmp_path)
    for step in range(10, 80, 10):
        directory.checkpoint(step).mkdir()
    directory.prune_checkpoints(keep_last, keep_every)
    assert directory.checkpoint_steps() == kept


def test_a_deletion_that_is_cut_short_leaves_no_checkpoint(tmp_path, monkeypatch):
    directory = make(tmp_path)
    for step in (1, 2):
        directory.checkpoint(step).mkdir()
        (directory.checkpoint(step) / "manifest.json").write_text("{}")
    remove = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda path: (path / "manifest.json").unlink() or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        directory.prune_checkpoints(1)
    assert directory.checkpoint_steps() == [2]
    monkeypatch.setattr(shutil, "rmtree", remove)
    directory.prune_checkpoints(1)
    assert [path.name for path in directory.checkpoints.iterdir()] == ["step-000002"]


def test_the_supervisor_hears_of_a_checkpoint_only_in_a_launched_run(tmp_path):
    directory = make(tmp_path)
    for step in (5, 10):
        directory.checkpoint(step).mkdir()
    directory.completed(5, CheckpointSection())
    assert not directory.launch.exists()
    directory.launch.mkdir()
    directory.completed(10, CheckpointSection(keep_last=1, keep_every=5))
    assert [path.name for path in directory.launch.iterdir()] == ["progress"]
    assert (directory.launch / "progress").read_text() == "10"
    assert directory.checkpoint_steps() == [5, 10]


@pytest.fixture
def full_disk(tmp_path):
    """A file system without room, and a file that takes the room."""
    if not mount_small_disk(tmp_path / "full"):
        pytest.skip("a small file system cannot be mounted here")
    try:
        filler = tmp_path / "full" / "filler"
        with filler.open("w") as stream, pytest.raises(OSError):
            while True:
                stream.write("x" * (1 << 16))
                stream.flush()
        yield filler
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path / "full")], check=True)


def test_a_full_disk_is_said_of_the_file_that_it_is_about(full_disk):
    """And nothing is left but what was whole before."""
    place = full_disk.parent
    log = MetricsLog(place / "metrics.jsonl", [], last_step=0)
    rollouts = [PLAIN] * 300
    for path, action in (
        (place / "metrics.jsonl", lambda: log.write(1, {"loss": 1.0})),
        (place / "step-000001.tmp", lambda: write_rollouts(place / "step-000001.jsonl", rollouts)),
        (place / "status.tmp", lambda: RunDirectory(place).write_status({"step": 1})),
        (place / "new.tmp", lambda: replace_text(place / "new", "x" * (1 << 16))),
    ):
        with pytest.raises(OSError) as error:
            action()
        assert error.value.errno == errno.ENOSPC and lasts(error.value)
        assert error.value.filename == str(path)
    assert not (place / "step-000001.jsonl").exists() and not list(place.glob("step-*.tmp"))
    full_disk.unlink()
    log.close()
    write_rollouts(place / "step-000001.jsonl", rollouts)
    assert len(list(read_rollouts(place / "step-000001.jsonl"))) == 300


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
