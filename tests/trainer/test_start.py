"""Where a run begins: the newest checkpoint that is whole, and none where there is doubt."""

import json
import shutil
from pathlib import Path

import pytest
from mcore.damaged import BOMBS, DAMAGES, damage, exploded

from megatron_credit.mcore.conversion import hf_to_checkpoint
from megatron_credit.mcore.manifest import MANIFEST, manifest_text
from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.metrics import MetricsLog, read_metrics
from megatron_credit.trainer.run_directory import RunDirectory
from megatron_credit.trainer.start import Start, find_start, prepare

MODEL = Path(__file__).parents[2] / "models" / "chain-sum-0.6m"
QUESTIONS = {"fingerprint": "f"}


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    return hf_to_checkpoint(MODEL, tmp_path_factory.mktemp("start"), dtype="fp32")


@pytest.fixture
def directory(converted, tmp_path) -> RunDirectory:
    """A run of 30 steps with checkpoints after 10 and 20, killed in step 25."""
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    for step in (10, 20):
        shutil.copytree(converted, directory.checkpoint(step))
    log = MetricsLog(directory.metrics, [], last_step=-1)
    for step in range(25):
        log.write(step, {"loss": step / 10})
        directory.rollout_file(step + 1).write_text("{}\n")
    log.close()
    (directory.rollouts / "meta.json").write_text("{}")
    return directory


def configured(directory: RunDirectory, **run) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"directory": directory.root, **run},
            "task": {},
            "policy": {"model": MODEL},
            "sampling": {"max_new_tokens": 8},
            "trainer": {"steps": 30},
        }
    )


def begin(directory: RunDirectory, **run) -> Start:
    """Finds the start and prepares the directory for it."""
    config = configured(directory, **run)
    start = find_start(config, directory, questions=QUESTIONS)
    prepare(config, directory, start).close()
    return start


def names(directory: RunDirectory) -> list[str]:
    return sorted(path.name for path in directory.checkpoints.iterdir())


def steps(directory: RunDirectory) -> tuple[list[int], list[int]]:
    """Last steps of the metrics and of the rollouts."""
    rollouts = [int(path.stem[-6:]) for path in directory.rollouts.glob("step-*.jsonl")]
    return [record["step"] for record in read_metrics(directory.metrics)], sorted(rollouts)


def test_the_newest_is_gone_on_from_and_later_steps_are_cut_off(directory):
    start = begin(directory)
    assert start == Start(directory.checkpoint(20))
    assert start.remarks == [] and start.last_step == 20
    assert steps(directory) == (list(range(21)), list(range(1, 21)))
    assert (directory.rollouts / "meta.json").exists()
    assert names(directory) == ["step-000010", "step-000020"]


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_one_is_named_set_aside_and_the_one_before_used(directory, kind):
    damage(directory.checkpoint(20), kind)
    start = find_start(configured(directory), directory, questions=QUESTIONS)
    assert names(directory) == ["step-000010", "step-000020"]  # nothing changed by looking
    assert start.checkpoint == directory.checkpoint(10)
    assert not exploded(directory.checkpoint(20)).exists()
    (remark,) = start.remarks
    assert DAMAGES[kind] in remark and "WARNING: not going on from step-000020" in remark
    assert str(directory.checkpoint(10)) in remark
    prepare(configured(directory), directory, start).close()
    assert names(directory)[:2] == ["step-000010", "step-000020.damaged"]
    assert steps(directory) == (list(range(11)), list(range(1, 11)))
    assert remark in (directory.logs / "checkpoints.log").read_text()
    assert find_start(configured(directory), directory, questions=QUESTIONS).damaged == {}


def test_nothing_that_was_set_aside_is_lost(directory, converted):
    for _ in range(2):
        damage(directory.checkpoint(20), "truncated")
        begin(directory)
        shutil.copytree(converted, directory.checkpoint(20))
    directory.prune_checkpoints(keep_last=1)
    assert names(directory) == ["step-000020", "step-000020.damaged", "step-000020.damaged-2"]


def test_only_damaged_ones_are_no_reason_to_start_over(directory):
    damage(directory.checkpoint(10), "missing_file")
    damage(directory.checkpoint(20), "cut_manifest")
    with pytest.raises(ValueError, match="none of the checkpoints in") as error:
        begin(directory)
    assert "step-000010 lacks __0_0.distcp" in str(error.value)
    assert "step-000020/manifest.json is not JSON" in str(error.value)
    assert names(directory) == ["step-000010", "step-000020"]
    assert steps(directory)[0] == list(range(25))


@pytest.mark.parametrize("kind", [kind for kind in DAMAGES if kind != "file"])
def test_a_damaged_one_that_was_asked_for_is_refused(directory, tmp_path, kind):
    wanted = Path(shutil.copytree(directory.checkpoint(10), tmp_path / "step-000010"))
    damage(wanted, kind)
    with pytest.raises(ValueError) as error:
        find_start(configured(directory, resume=wanted), directory, questions=QUESTIONS)
    assert DAMAGES[kind] in str(error.value)
    assert not exploded(wanted).exists()


def test_a_file_that_was_asked_for_is_refused(directory, tmp_path):
    (tmp_path / "step-000010").write_text("")
    config = configured(directory, resume=tmp_path / "step-000010")
    with pytest.raises(ValueError, match="is not a checkpoint directory"):
        find_start(config, directory, questions=QUESTIONS)


@pytest.mark.parametrize("field", ["architecture", "dtype", "optimizer", "teacher"])
def test_another_models_checkpoint_is_not_damage(directory, field):
    """Going on from an older one would not be what the user wants."""
    edit(directory.checkpoint(20), {field: "other"})
    with pytest.raises(ValueError, match=f"step-000020 has {field}=other"):
        begin(directory)
    assert names(directory) == ["step-000010", "step-000020"]


def test_other_questions_are_refused(directory):
    edit(directory.checkpoint(20), {"data": "others"})
    with pytest.raises(ValueError, match="its fingerprint was others, is f"):
        begin(directory)
    assert begin(directory, allow_new_data=True).last_step == 20


def edit(checkpoint: Path, identity: dict[str, str]) -> None:
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    manifest["identity"] |= identity
    content = {name: manifest[name] for name in ("identity", "num_steps", "layout", "files")}
    (checkpoint / MANIFEST).write_text(manifest_text(content))


def test_a_path_into_a_directory_with_later_checkpoints_is_refused(directory):
    """Its step 20 would be another than the one that stands there."""
    config = configured(directory, resume=directory.checkpoint(10))
    with pytest.raises(ValueError, match="has a later checkpoint, step-000020"):
        find_start(config, directory, questions=QUESTIONS)
    newest = configured(directory, resume=directory.checkpoint(20))
    start = find_start(newest, directory, questions=QUESTIONS)
    assert start.checkpoint == directory.checkpoint(20)


def test_a_second_attempt_goes_on_with_what_the_first_one_left(directory, converted, tmp_path):
    fresh = RunDirectory(tmp_path / "fresh")
    fresh.create()
    given = Path(shutil.copytree(converted, tmp_path / "step-000003"))
    for resume, first in (("never", None), (given, given)):
        for again in (False, True):
            config = configured(fresh, resume=resume)
            found = find_start(config, fresh, questions=QUESTIONS, again=again)
            assert found.checkpoint == first
        config = configured(directory, resume=resume)
        found = find_start(config, directory, questions=QUESTIONS, again=True)
        assert found.checkpoint == directory.checkpoint(20)


def test_never_needs_an_unused_directory(directory):
    with pytest.raises(ValueError, match="already holds a run"):
        begin(directory, resume="never")


def test_steps_up_to_a_damaged_checkpoint_are_progress_again(directory):
    directory.launch.mkdir()
    directory.write_progress(20)
    begin(directory)
    assert (directory.launch / "progress").read_text() == "20"
    damage(directory.checkpoint(20), "flipped")
    begin(directory)
    assert (directory.launch / "progress").read_text() == "10"


def test_a_checkpoint_of_before_the_manifest_had_a_checksum_is_read(directory):
    path = directory.checkpoint(20) / MANIFEST
    manifest = json.loads(path.read_text())
    manifest.pop("crc32")
    path.write_text(json.dumps(manifest))
    assert begin(directory).last_step == 20


def test_both_bombs_are_tried():
    assert BOMBS == ["index_bomb", "object_bomb"]
