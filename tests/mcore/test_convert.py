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
from mcore.convert_worker import LAYOUTS, WRITTEN, fits

KINDS = tiny_models.KINDS
every_case = pytest.mark.parametrize(
    "case", [f"{kind}/{layout}" for kind in KINDS for layout in LAYOUTS if fits(kind, layout)]
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """Holds the checkpoints, what the workers wrote, and results.json."""
    directory = tmp_path_factory.mktemp("convert")
    generator = torch.Generator().manual_seed(3)
    lengths = convert_worker.LENGTHS
    ids = [torch.randint(0, 131, (length,), generator=generator) for length in lengths]
    for kind in KINDS:
        path = tiny_models.write_tiny_model(directory, kind)
        logits = tiny_models.reference_logits(path, ids)
        torch.save({"ids": ids, "logits": logits}, path / "reference.pt")
    multiprocessing.spawn(
        convert_worker.run,
        args=(str(directory / "rendezvous"), str(directory), list(KINDS)),
        nprocs=convert_worker.WORLD_SIZE,
    )
    return directory


@pytest.fixture(scope="module")
def results(directory) -> dict[str, list[dict]]:
    """For each check, what each rank found."""
    return json.loads((directory / "results.json").read_text())


@every_case
def test_logits_are_those_of_transformers(results, case):
    for inputs in ("packed", "padded"):
        errors = [rank[inputs] for rank in results[case] if rank[inputs] >= 0]
        # Every replica's last stage saw every sequence, or its context share of it.
        num_stages = LAYOUTS[case.split("/")[1]].get("pipeline", 1)
        assert len(errors) == convert_worker.WORLD_SIZE // num_stages
        assert max(errors) <= 1e-5


@every_case
def test_export_gives_back_every_bit_and_name(results, case):
    assert [rank["differences"] for rank in results[case]] == [[]] * convert_worker.WORLD_SIZE


@every_case
def test_random_weights_do_not_depend_on_the_layout(results, case):
    plain = results[case.split("/")[0] + "/tp1"][0]["random"]
    assert {rank["random"] for rank in results[case]} == {plain}


def test_random_weights_depend_on_the_name(results):
    assert len({results[f"{kind}/tp1"][0]["random"] for kind in KINDS}) == len(KINDS)


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if fits("llama", layout)])
def test_padding_rows_are_zero_and_only_where_the_vocabulary_is_odd(results, layout):
    # 131 rows need one row of padding for two tensor ranks; 136 need none. Random and loaded alike.
    odd = {tuple(rank["padding_rows"]) for rank in results[f"qwen3_odd_vocab/{layout}"]}
    assert odd == ({(-1.0, -1.0), (0.0, 0.0)} if "tp2" in layout else {(-1.0, -1.0)})
    even = {tuple(rank["padding_rows"]) for rank in results[f"qwen3_tied/{layout}"]}
    assert even == {(-1.0, -1.0)}


@every_case
def test_bfloat16_weights_are_the_rounded_ones(results, case):
    assert [rank["bf16"] for rank in results[case]] == [[]] * convert_worker.WORLD_SIZE


@pytest.mark.parametrize(
    ("kind", "layout"),
    [(kind, layout) for kind in KINDS for layout in WRITTEN if fits(kind, layout)],
)
def test_transformers_reads_what_was_written(directory, kind, layout):
    reference = torch.load(directory / kind / "reference.pt")
    found = tiny_models.reference_logits(directory / f"{kind}-{layout}", reference["ids"])
    assert all(torch.equal(*pair) for pair in zip(found, reference["logits"], strict=True))


def test_tensor_of_another_shape_is_refused(results):
    refusals = [rank["wrong_shape"] for rank in results["llama/pp2"]]
    embedding = "tensor model.embed_tokens.weight has shape (130, 48)"
    assert refusals[0] == f"{embedding}, but config.json implies (131, 48)"
    # The second stage holds layers 2 and 3.
    norm = "tensor model.layers.2.input_layernorm.weight has shape (47,)"
    assert refusals[3] == f"{norm}, but config.json implies (48,)"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_and_its_gradients(results, layout):
    for rank in results[f"attention/{layout}"]:
        for inputs in ("packed", "batch"):
            assert max(rank[inputs].values()) <= 2e-6
