"""Training goes on from a checkpoint as if it had never stopped, and never from a wrong one.

Every route is run by the same two processes, because starting processes is the slow part.
"""

import errno
import json
import subprocess
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as multiprocessing
from mcore import checkpoint_worker
from mcore.checkpoint_worker import FROM_ONE, ROUTES, TO_ONE
from mcore.damaged import DAMAGES, exploded
from mcore.save_checks import mount_small_disk

ALL = {**ROUTES, "one": FROM_ONE}
LOADS = [(name, target) for name, route in ALL.items() for target in route.targets]
LOADS += [(name, "one") for name in TO_ONE]
OTHER_LAYOUTS = [(name, target) for name, target in LOADS if target != "same"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    mounted = mount_small_disk(directory / "full")
    try:
        multiprocessing.spawn(
            checkpoint_worker.run, args=(str(directory),), nprocs=checkpoint_worker.WORLD_SIZE
        )
        yield directory
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(directory / "full")], check=True)


@pytest.fixture(scope="module")
def results(directory):
    return torch.load(directory / "results.pt")


@pytest.fixture(scope="module")
def found(directory):
    return json.loads((directory / "found.json").read_text())


@pytest.fixture(scope="module")
def saves(found):
    return found["saves"]


@pytest.mark.parametrize(("name", "target"), LOADS)
def test_weights_come_back_exactly(results, name, target):
    saved, loaded = results[name]["weights"], results[name][target]["loaded"]
    assert sorted(saved) == sorted(loaded)
    for key, weight in saved.items():
        assert torch.equal(loaded[key], weight), key


@pytest.mark.parametrize("name", ALL)
def test_the_same_layout_goes_on_bit_for_bit(results, name):
    went_on, resumed = results[name]["went_on"], results[name]["same"]
    assert resumed["metrics"] == went_on["metrics"]
    assert resumed["steps"] == went_on["steps"] == 4
    for key, weight in went_on["after"].items():
        assert torch.equal(resumed["after"][key], weight), key


@pytest.mark.parametrize("name", ALL)
def test_a_step_draws_nothing_so_there_is_no_random_state_to_save(results, name):
    assert not results[name]["drew"]


@pytest.mark.parametrize(("name", "target"), OTHER_LAYOUTS)
def test_another_layout_goes_on_alike(results, name, target):
    """Moments, step count and schedule included: steps of 1e-2 would show what was lost."""
    went_on, resumed = results[name]["went_on"], results[name][target]
    tolerance = 1e-2 if name == "bf16" else 1e-5
    for one, other in zip(resumed["metrics"], went_on["metrics"], strict=True):
        assert one["lr"] == other["lr"]
        assert one["loss"] == pytest.approx(other["loss"], abs=tolerance)
    for key, weight in went_on["after"].items():
        assert (resumed["after"][key] - weight).abs().max() <= tolerance, key


@pytest.mark.parametrize("name", ALL)
def test_what_is_written_while_training_goes_on_is_the_state_of_before(directory, name):
    """Byte for byte what a save wrote that training waited for."""
    at_once = json.loads((directory / name / "manifest.json").read_text())
    meanwhile = json.loads((directory / f"{name}_meanwhile" / "manifest.json").read_text())
    for manifest in (at_once, meanwhile):
        # The index holds the name of its directory.
        manifest["files"].pop(".metadata")
        manifest.pop("crc32")
    assert at_once == meanwhile
    assert "__0_0.distcp" in at_once["files"]


def test_data_ranks_share_what_the_optimizer_splits(directory):
    """6 of the 12 bytes a parameter on each rank, and on the first weights and average: 14; the
    rest is what surrounds each tensor."""
    sizes = [(directory / "dp2" / f"__{rank}_0.distcp").stat().st_size for rank in (0, 1)]
    assert 6 / 14 < sizes[1] / sizes[0] < 0.55


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_refused_by_name(directory, found, kind):
    assert f"damaged_{kind}" in found["refused"][kind]
    assert DAMAGES[kind] in found["refused"][kind]
    assert not exploded(directory / f"damaged_{kind}").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent", "absent is not a complete checkpoint: it has no manifest.json"),
        ("other_model", "odd_tp2 has architecture="),
        ("other_dtype", "bf16 has dtype=bf16, but this run has dtype=fp32"),
        ("other_optimizer", "sgd has optimizer=sgd, but this run has optimizer=adam"),
        ("other_teacher", "tp2 has teacher=ema, but this run has teacher=none"),
        ("exists", "tp2 exists already; a checkpoint is never overwritten"),
    ],
)
def test_refusals_name_what_is_wrong(found, name, message):
    assert message in found["refused"][name]


def test_refusals_change_nothing(directory, found):
    assert found["refused"]["changed"] == "[]"
    assert not list(directory.glob(".*"))


def test_manifest_says_whose_it_is(directory):
    manifest = json.loads((directory / "tp2" / "manifest.json").read_text())
    assert manifest["num_steps"] == 2
    assert manifest["layout"]["tensor"] == 2 and manifest["layout"]["world_size"] == 2
    assert set(manifest["files"]) == {".metadata", "__0_0.distcp", "__1_0.distcp", "metadata.json"}


def test_one_save_at_a_time(saves):
    order = saves["order"]
    assert order["busy"] == [False, False, None]
    assert order["one"] and order["saved"] == "one"
    assert order["waited"] and order["idle"] and order["taken"] is None
    assert order["names"] == ["one", "three", "two"]


def test_what_follows_a_save_is_done_once_when_it_has_its_name(saves):
    assert saves["order"]["followed"] == [[True], []]
    for number, _, words in saves["order"]["after"]:
        assert number == errno.ENOENT and "the checkpoint is complete, but old ones" in words


def test_every_rank_hears_which_rank_could_not_write(saves):
    assert saves["rank"]["left"] == [] and saves["rank"]["then"] == ["one"]
    for number, name, words in saves["rank"]["errors"]:
        assert number == errno.EACCES and Path(name).name == "one"
        assert "rank 1: Permission denied: __1_0.distcp" in words


def test_a_place_that_is_none_is_named(saves):
    for number, name, words in saves["no_place"]:
        assert number == errno.ENOTDIR
        assert name.endswith("manifest.json/step-000001") and "Not a directory" in words


def test_a_full_disk_ends_the_save_and_leaves_what_was_there(saves):
    if "full" not in saves:
        pytest.skip("a small file system cannot be mounted here")
    full = saves["full"]
    for kind, name in (("later", "two"), ("at_once", "three")):
        assert len(full[kind]) == 2
        for number, place, words in full[kind]:
            assert number == errno.ENOSPC and Path(place).name == name
            assert "No space left on device" in words and "Make room" in words
    assert full["left"] == ["filler", "one"]
    assert full["intact"] == [True, True]
    assert full["then"] == ["one", "two"]
