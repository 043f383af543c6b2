"""Safetensors directories in and out."""

import json

import pytest
import torch
from mcore import tiny_models
from safetensors.torch import save_file

from megatron_credit.mcore.hf_files import (
    open_checkpoint,
    refuse_unread,
    tensor_names,
    write_checkpoint,
)

TENSORS = {
    "first": torch.arange(6.0).view(2, 3),
    "second": torch.tensor([1.5, -2.0]),
    "third": torch.tensor([[7.0]]),
}


@pytest.fixture
def source(tmp_path):
    directory = tmp_path / "source"
    directory.mkdir()
    config = {"model_type": "llama", "torch_dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("tokens")
    (directory / "notes.txt").write_text("not part of a model")
    return directory


def read_all(directory) -> dict[str, torch.Tensor]:
    read = open_checkpoint(directory)
    return {name: read(name) for name in tensor_names(directory)}


def test_one_file_when_it_fits(tmp_path, source):
    write_checkpoint(tmp_path / "out", TENSORS.items(), source)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    found = read_all(tmp_path / "out")
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)
    assert (tmp_path / "out/tokenizer.json").read_text() == "tokens"
    # The source's bfloat16 would round the float32 weights when they are read.
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config == {"model_type": "llama", "dtype": "float32"}


def test_several_files_and_their_index(tmp_path, source):
    # first has 24 bytes, second 8 and third 4.
    write_checkpoint(tmp_path / "out", TENSORS.items(), source, max_file_bytes=12)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {"total_size": 36},
        "weight_map": {
            "first": "model-00001-of-00002.safetensors",
            "second": "model-00002-of-00002.safetensors",
            "third": "model-00002-of-00002.safetensors",
        },
    }
    found = read_all(tmp_path / "out")
    assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)


def test_views_and_strides_are_written_as_values(tmp_path, source):
    whole = torch.arange(12.0).view(3, 4)
    views = {"transposed": whole.t(), "row": whole[1], "again": whole[1]}
    write_checkpoint(tmp_path / "out", views.items(), source)
    found = read_all(tmp_path / "out")
    assert found["transposed"].tolist() == whole.t().tolist()
    assert found["row"].tolist() == found["again"].tolist() == [4.0, 5.0, 6.0, 7.0]


def test_all_or_nothing(tmp_path, source):
    def broken():
        yield "first", TENSORS["first"]
        raise RuntimeError("the export stopped")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="the export stopped"):
            write_checkpoint(tmp_path / "out", broken(), source)
        assert not (tmp_path / "out").exists()
    write_checkpoint(tmp_path / "out", TENSORS.items(), source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    with pytest.raises(ValueError, match="out exists already; give a new directory"):
        write_checkpoint(tmp_path / "out", TENSORS.items(), source)


def test_what_cannot_be_read(tmp_path, source):
    with pytest.raises(ValueError, match=r"has neither model\.safetensors nor .*index\.json"):
        open_checkpoint(source)
    save_file(TENSORS, source / "model.safetensors")
    read = open_checkpoint(source)
    with pytest.raises(ValueError, match=r"the checkpoint .*source has no tensor fourth"):
        read("fourth")
    index = {"weight_map": {"first": "model.safetensors", "second": "gone.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"names files that do not exist: gone\.safetensors"):
        open_checkpoint(source)


def test_experts_that_share_a_tensor_are_read_one_by_one(tmp_path):
    """As transformers 5 keeps them in memory, and writes them when asked to."""
    model = tiny_models.tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path / "published")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    names = tensor_names(tmp_path / "published")
    assert "model.layers.3.mlp.experts.7.up_proj.weight" in names
    assert "model.layers.3.mlp.experts.gate_up_proj" in tensor_names(tmp_path / "fused")
    published, fused = open_checkpoint(tmp_path / "published"), open_checkpoint(tmp_path / "fused")
    for name in names:
        assert torch.equal(published(name), fused(name)), name
    absent = "model.layers.4.mlp.experts.0.up_proj.weight"
    with pytest.raises(ValueError, match=f"has no tensor {absent}"):
        fused(absent)


EMBEDDING = torch.arange(6.0).view(3, 2)
EXPERT = "model.layers.0.mlp.experts.{}.gate_proj.weight"


@pytest.mark.parametrize(
    ("extra", "unread"),
    [
        ({}, ""),
        ({"lm_head.weight": EMBEDDING.clone()}, ""),
        ({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, ""),
        ({"model.layers.0.mlp.experts.gate_up_proj": torch.ones(2, 8, 2)}, ""),
        ({"lm_head.weight": EMBEDDING + 1}, "1 tensors .* no place for: lm_head.weight"),
        (
            {f"model.layers.{layer}.self_attn.q_proj.bias": torch.ones(2) for layer in range(9)},
            "9 tensors .*: model.layers.0.self_attn.q_proj.bias, .*; correct config.json",
        ),
    ],
)
def test_no_tensor_of_a_checkpoint_is_ignored(tmp_path, extra, unread):
    tensors = {"model.embed_tokens.weight": EMBEDDING}
    save_file(tensors | extra, tmp_path / "model.safetensors")
    read = [*tensors, EXPERT.format(0), EXPERT.format(1)]
    if not unread:
        return refuse_unread(tmp_path, read)
    with pytest.raises(ValueError, match=unread):
        refuse_unread(tmp_path, read)
