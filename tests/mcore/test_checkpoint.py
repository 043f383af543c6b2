"""Training goes on from a checkpoint as if it had never stopped, and never from a wrong one.

Every route is run by the same two processes, because starting processes is the slow part.
"""

import json
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as multiprocessing
from mcore import checkpoint_worker
from mcore.checkpoint_worker import ROUTES

LOADS = [(name, target) for name, route in ROUTES.items() for target in route.targets]
OTHER_LAYOUTS = [(name, target) for name, target in LOADS if target != "same"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    multiprocessing.spawn(
        checkpoint_worker.run,
        args=(str(directory / "rendezvous"), str(directory)),
        nprocs=checkpoint_worker.WORLD_SIZE,
    )
    return directory


@pytest.fixture(scope="module")
def results(directory):
    return torch.load(directory / "results.pt")


@pytest.fixture(scope="module")
def refused(directory):
    return json.loads((directory / "refused.json").read_text())


@pytest.mark.parametrize(("name", "target"), LOADS)
def test_weights_come_back_exactly(results, name, target):
    saved, loaded = results[name]["weights"], results[name][target]["loaded"]
    assert sorted(saved) == sorted(loaded)
    for key, weight in saved.items():
        assert torch.equal(loaded[key], weight), key


@pytest.mark.parametrize("name", ROUTES)
def test_the_same_layout_goes_on_bit_for_bit(results, name):
    went_on, resumed = results[name]["went_on"], results[name]["same"]
    assert resumed["metrics"] == went_on["metrics"]
    assert resumed["steps"] == went_on["steps"] == 4
    for key, weight in went_on["after"].items():
        assert torch.equal(resumed["after"][key], weight), key


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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing_file", "damaged_missing_file lacks __0_0.distcp"),
        ("altered", "damaged_altered is damaged: __0_0.distcp"),
        ("cut_manifest", "damaged_cut_manifest/manifest.json is not JSON"),
        ("absent", "damaged_absent is not a complete checkpoint: it has no manifest.json"),
        ("bomb", "damaged_bomb/.metadata is not a checkpoint's index: it refers to io.open"),
        ("other_model", "odd_tp2 has architecture="),
        ("other_dtype", "bf16 has dtype=bf16, but this run has dtype=fp32"),
        ("other_optimizer", "sgd has optimizer=sgd, but this run has optimizer=adam"),
        ("exists", "tp2 exists already; a checkpoint is never overwritten"),
    ],
)
def test_refusals_name_what_is_wrong(refused, name, message):
    assert message in refused[name]


def test_refusals_change_nothing(directory, refused):
    assert refused["changed"] == "[]"
    assert not (directory / "exploded").exists()
    assert not list(directory.glob(".*"))


def test_manifest_says_whose_it_is(directory):
    manifest = json.loads((directory / "tp2" / "manifest.json").read_text())
    assert manifest["num_steps"] == 2
    assert manifest["layout"]["tensor"] == 2 and manifest["layout"]["world_size"] == 2
    assert set(manifest["files"]) == {".metadata", "__0_0.distcp", "__1_0.distcp", "metadata.json"}
