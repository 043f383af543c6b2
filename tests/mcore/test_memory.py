"""Predicted memory is the memory that a real policy has under each layout."""

import json
from pathlib import Path

import pytest
import torch.multiprocessing as multiprocessing
from mcore import memory_worker
from mcore.memory_worker import CASES, MODELS

from megatron_credit.mcore.config import ParallelConfig
from megatron_credit.mcore.memory import engine_memory, rank_parameters
from megatron_credit.mcore.rank_layout import rank_places

FACTOR = 1.25
every_case = pytest.mark.parametrize("name", CASES)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, list[dict]]:
    """Of each case, what each rank predicted and found."""
    directory = tmp_path_factory.mktemp("memory")
    multiprocessing.spawn(
        memory_worker.run, args=(str(directory),), nprocs=memory_worker.WORLD_SIZE
    )
    return json.loads(Path(directory, "results.json").read_text())


@every_case
@pytest.mark.parametrize("part", ["weights", "gradients"])
def test_parameters_and_gradients_are_counted_exactly(results, name, part):
    for rank in results[name]:
        assert rank["predicted"][part] == rank["real"][part]


@every_case
def test_optimizer_state_is_counted_exactly_over_all_ranks(results, name):
    """One rank's part depends on where megatron cuts its buffers."""
    real = sum(rank["real"]["optimizer"] for rank in results[name])
    predicted = sum(rank["predicted"]["optimizer"] for rank in results[name])
    # A byte of rounding up for each of two kinds of parameters on each rank.
    assert 0 <= predicted - real <= 2 * memory_worker.WORLD_SIZE


@every_case
def test_a_checkpoint_is_as_large_as_predicted(results, name):
    """A layout pads the vocabulary to a multiple of its own."""
    real = sum(rank["real"]["checkpoint"] for rank in results[name])
    assert real == pytest.approx(results[name][0]["predicted"]["checkpoint"], rel=0.01)


@every_case
def test_buffers_are_padded_by_little(results, name):
    """Parameters begin at multiples of 64 elements, buckets end at multiples of 128 x ranks."""
    for rank in results[name]:
        assert 0 <= rank["real"]["buffers"] - rank["real"]["gradients"] <= 64 * 1024


@every_case
def test_activations_are_predicted_within_the_stated_factor(results, name):
    for rank in results[name]:
        ratio = rank["predicted"]["activations"] / rank["real"]["activations"]
        assert 1 / FACTOR <= ratio <= FACTOR, ratio


@every_case
def test_every_rank_stands_where_the_plan_says(results, name):
    planned = rank_places(ParallelConfig(**CASES[name].parallel), memory_worker.WORLD_SIZE)
    assert [rank["place"] for rank in results[name]] == [vars(place) for place in planned]


def test_engine_holds_every_parameter_once():
    architecture = MODELS["moe"]
    whole = rank_parameters(architecture, ParallelConfig(), 0)
    found = engine_memory(architecture, bytes_per_number=2, tensor=1)
    assert found.weights == 2 * (whole.dense + whole.expert)
    # Keys and values of 4 layers x 4 heads x 16.
    assert found.kv_per_token == 2 * 2 * 4 * 4 * 16
