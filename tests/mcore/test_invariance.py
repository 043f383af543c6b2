"""The check of a layout passes a sound one and finds what is broken in another."""

import shutil
from dataclasses import replace

import pytest
import torch
from mcore import invariance_faults
from mcore.invariance_faults import SCALED, VARIANTS
from mcore.parity_worker import MODELS, SIZES

from megatron_credit.errors import FailedProcess
from megatron_credit.mcore.architecture import Architecture, check_parallel
from megatron_credit.mcore.config import ParallelConfig
from megatron_credit.mcore.invariance import (
    Job,
    compare,
    fewest_processes,
    is_small,
    make_twin,
    read_verdict,
    run_rank,
    run_world,
)
from megatron_credit.objective.config import ObjectiveConfig

LARGE = Architecture(
    **SIZES
    | {
        "num_layers": 36,
        "hidden_size": 4096,
        "ffn_size": 12288,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "max_positions": 40960,
    },
    vocab_size=151_937,
    tied_embeddings=False,
)
EXPERTS = replace(LARGE, num_experts=128, experts_per_token=8, expert_ffn_size=768)


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    """Of each variant of tensor and sequence parallelism over two ranks."""
    directory = tmp_path_factory.mktemp("invariance")
    for name in VARIANTS:
        (directory / name).mkdir()
    job = Job(
        architecture=MODELS["odd"],
        weights=None,
        parallel=ParallelConfig(tensor=2, sequence_parallel=True),
        num_processes=2,
        objective=ObjectiveConfig(),
        temperature=0.8,
    )
    run_world(run_rank, job.alone(), directory, is_reference=True)
    for path in directory.glob("*.safetensors"):
        for name in VARIANTS:
            shutil.copy(path, directory / name)
    run_world(invariance_faults.run_variants, job, directory, is_reference=False)
    return {name: read_verdict(directory / name) for name in VARIANTS}


def test_a_sound_layout_passes_with_room(verdicts):
    found = verdicts["sound"]
    assert found.wrong == []
    assert found.gradients[0].error <= found.tolerance / 2
    assert found.tolerance <= 1e-4
    # Layers of norms and matrices, embedding, output and last norm.
    assert len(found.gradients) == 4 * 9 + 3
    assert 0 < found.loss.error <= found.tolerance


def test_gradients_that_were_never_summed_are_found(verdicts):
    found = verdicts["norms"]
    # megatron knows the norms of heads by their names, and sums their gradients in any case.
    norms = {
        one.name
        for one in found.gradients
        if "norm" in one.name and "self_attention" not in one.name
    }
    assert {one.name for one in found.wrong} == norms
    assert found.gradients[0].error > 1e-2


def test_a_gradient_a_thousandth_too_large_is_named(verdicts):
    found = verdicts["scaled"]
    assert [one.name for one in found.wrong] == [SCALED]
    assert found.gradients[0].name == SCALED
    assert 1e-4 < found.gradients[0].error <= 1.01e-3


def test_a_nan_is_wrong():
    one = {"loss": torch.ones(()), "weight": torch.ones(3)}
    broken = one | {"weight": torch.tensor([1.0, torch.nan, 1.0])}
    assert [each.name for each in compare(one, one, broken).wrong] == ["weight"]
    with pytest.raises(FailedProcess, match="weight"):
        compare(one, one, {"loss": torch.ones(())})


@pytest.mark.parametrize(
    ("architecture", "parallel", "processes", "fewest"),
    [
        (LARGE, {"tensor": 8, "sequence_parallel": True, "pipeline": 6, "context": 2}, 384, 192),
        (LARGE, {"pipeline": 3, "virtual_pipeline": 4}, 12, 6),
        (LARGE, {}, 1, 1),
        (EXPERTS, {"tensor": 4, "sequence_parallel": True, "expert": 32}, 64, 32),
        (EXPERTS, {"expert": 8, "expert_tensor": 2, "pipeline": 2}, 64, 32),
    ],
)
def test_a_twin_is_small_and_is_laid_out_like_the_model(architecture, parallel, processes, fewest):
    layout = ParallelConfig(**parallel)
    check_parallel(architecture, layout, processes)
    twin = make_twin(architecture, layout)
    assert is_small(twin) and not is_small(architecture)
    found = fewest_processes(twin, layout, processes)
    assert found == fewest
    check_parallel(twin, layout, found)
    kept = ("family", "num_heads", "num_kv_heads", "head_dim", "num_experts", "experts_per_token")
    for name in kept:
        assert vars(twin)[name] == vars(architecture)[name]
    assert twin.num_layers >= 2
    # The last tensor rank has as many padding rows as that of the model.
    assert twin.vocab_size % layout.tensor == architecture.vocab_size % layout.tensor
