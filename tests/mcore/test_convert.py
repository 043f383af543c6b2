"""Weights in and out under every layout, judged by transformers' own tensors and logits.

All layouts run in one world of four processes, because starting processes is the slow part; layouts
smaller than four leave the rest to data parallelism.
"""

import json
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as multiprocessing
from mcore import convert_worker, tiny_models
from mcore.convert_worker import LAYOUTS

CASES = [f"{kind}/{layout}" for kind in tiny_models.KINDS for layout in LAYOUTS]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """Holds the checkpoints, what the workers wrote, and results.json."""
    directory = tmp_path_factory.mktemp("convert")
    generator = torch.Generator().manual_seed(3)
    lengths = convert_worker.LENGTHS
    ids = [torch.randint(0, 131, (length,), generator=generator) for length in lengths]
    for kind in tiny_models.KINDS:
        path = tiny_models.write_tiny_model(directory, kind)
        logits = tiny_models.reference_logits(path, ids)
        torch.save({"ids": ids, "logits": logits}, path / "reference.pt")
    multiprocessing.spawn(
        convert_worker.run,
        args=(str(directory / "rendezvous"), str(directory), list(tiny_models.KINDS)),
        nprocs=convert_worker.WORLD_SIZE,
    )
    return directory


@pytest.fixture(scope="module")
def results(directory) -> dict[str, list[dict]]:
    return json.loads((directory / "results.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(results, case):
    for inputs in ("packed", "padded"):
        errors = [rank[inputs] for rank in results[case] if rank[inputs] >= 0]
        assert errors and max(errors) <= 1e-5
