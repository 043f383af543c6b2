"""Safetensors directories in and out."""

import json

import pytest
import torch
from safetensors.torch import save_file

from megatron_credit.mcore.hf_files import open_checkpoint, tensor_names, write_checkpoint

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
