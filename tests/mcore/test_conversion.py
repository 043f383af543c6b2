"""Checkpoints of any layout become the Hugging Face directory that the run would have exported."""

import json
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as multiprocessing
from mcore import conversion_checks, tiny_models
from mcore.conversion_checks import LAYOUTS
from mcore.damaged import BOMBS, DAMAGES, Bomb, damage
from mcore.parity_worker import make_batch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from megatron_credit.cli import app
from megatron_credit.mcore.conversion import checkpoint_to_hf, hf_to_checkpoint
from megatron_credit.mcore.hf_files import open_checkpoint
from megatron_credit.mcore.manifest import read_manifest
from megatron_credit.mcore.world import in_child
from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.run_directory import RunDirectory
from megatron_credit.trainer.start import find_start

every_layout = pytest.mark.parametrize("name", LAYOUTS)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """Models, a checkpoint of each layout, and what one process exported of each."""
    directory = tmp_path_factory.mktemp("conversion")
    for kind in dict.fromkeys(kind for kind, _, _ in LAYOUTS.values()):
        tiny_models.write_tiny_model(directory, kind)
    multiprocessing.spawn(conversion_checks.train, args=(str(directory),), nprocs=2)
    in_child(conversion_checks.export_all, directory)
    return directory


@pytest.fixture(scope="module")
def bf16_model(directory) -> Path:
    """A model in bf16, but for one norm."""
    path = Path(shutil.copytree(directory / "qwen3_odd_vocab", directory / "bf16"))
    tensors = load_file(path / "model.safetensors")
    stored = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    stored["model.norm.weight"] = tensors["model.norm.weight"]
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    return path


def assert_same_files(found: Path, expected: Path) -> None:
    one, other = load_file(found / "model.safetensors"), load_file(expected / "model.safetensors")
    assert sorted(one) == sorted(other)
    for name, tensor in other.items():
        assert one[name].dtype == tensor.dtype, name
        assert torch.equal(one[name], tensor), name


@every_layout
def test_every_weight_is_what_the_run_itself_exports(directory, name):
    live = torch.load(directory / f"{name}.pt")["weights"]
    start = load_file(directory / LAYOUTS[name][0] / "model.safetensors")
    written = load_file(directory / f"{name}-hf" / "model.safetensors")
    assert sorted(written) == sorted(live)
    for key, tensor in live.items():
        assert torch.equal(written[key], tensor.float()), key
    assert not torch.equal(written["model.norm.weight"], start["model.norm.weight"])


@every_layout
def test_transformers_computes_what_the_run_computed(directory, name):
    _, _, dtype = LAYOUTS[name]
    model = AutoModelForCausalLM.from_pretrained(directory / f"{name}-hf", dtype=torch.float32)
    expected = torch.load(directory / f"{name}.pt")["logprobs"]
    batch = make_batch("mixed", model.config.vocab_size)
    for sequence, found_T in zip(batch, expected, strict=True):
        with torch.no_grad():
            logits_LV = model(sequence.token_ids_L[None]).logits[0]
        response_T = sequence.token_ids_L[sequence.num_prompt :]
        logprob_TV = logits_LV[sequence.num_prompt - 1 : -1].log_softmax(-1)
        picked_T = logprob_TV.gather(-1, response_T[:, None])[:, 0]
        torch.testing.assert_close(found_T, picked_T, rtol=0, atol=1e-5 if dtype == "fp32" else 0.1)


@pytest.mark.parametrize("dtype", ["auto", "fp32"])
def test_there_and_back_gives_every_bit_and_type(directory, bf16_model, dtype):
    """Through a bf16 checkpoint (where the one float32 norm is rounded) and a float32 one."""
    checkpoint = hf_to_checkpoint(bf16_model, directory / f"there-{dtype}", dtype=dtype)
    stored = read_manifest(checkpoint, {})["identity"]["dtype"]
    assert stored == ("bf16" if dtype == "auto" else "fp32")
    back = directory / f"back-{dtype}"
    checkpoint_to_hf(checkpoint, bf16_model, back)
    if dtype == "fp32":
        assert_same_files(back, bf16_model)
        return
    found = load_file(back / "model.safetensors")
    for name, tensor in load_file(bf16_model / "model.safetensors").items():
        assert torch.equal(found[name], tensor.bfloat16().to(tensor.dtype)), name


def test_going_on_from_a_converted_checkpoint_is_starting_from_the_model(directory):
    checkpoint = hf_to_checkpoint(directory / "qwen3_odd_vocab", directory / "converted")
    assert checkpoint == directory / "converted" / "step-000000"
    owner = read_manifest(checkpoint, {})["identity"]
    assert (owner["dtype"], owner["optimizer"], owner["data"]) == ("fp32", "adam", "")
    multiprocessing.spawn(conversion_checks.resume, args=(str(directory),), nprocs=2)
    results = json.loads((directory / "resume.json").read_text())
    assert results["converted"] == results["fresh"]
    back = directory / "converted-back"
    checkpoint_to_hf(checkpoint, directory / "qwen3_odd_vocab", back)
    assert_same_files(back, directory / "qwen3_odd_vocab")


@pytest.fixture
def no_child(monkeypatch):
    """Starting the process that would load something is a failure."""

    def loaded(*_arguments):
        raise AssertionError("something was loaded")

    monkeypatch.setattr("megatron_credit.mcore.conversion.in_child", loaded)


@pytest.mark.parametrize(
    ("checkpoint", "model", "output", "message"),
    [
        ("tp2/step-000001", "qwen3_odd_vocab", "tp2-hf", "tp2-hf exists already"),
        ("tp2/step-000001", "qwen3_odd_vocab", "tp2.pt/hf", "is no directory that you may write"),
        ("tp2/step-000001", "qwen3_tied", "new", "step-000001 is not one of the model in"),
        ("tp2/step-000001", "absent", "new", "absent is not a directory"),
        ("tp2", "qwen3_odd_vocab", "new", "tp2 is not a complete checkpoint"),
    ],
)
def test_refused_by_name_before_anything_is_loaded(
    directory, no_child, checkpoint, model, output, message
):
    with pytest.raises(ValueError, match=message):
        checkpoint_to_hf(directory / checkpoint, directory / model, directory / output)
    assert not (directory / "new").exists()


def test_a_model_without_weights_and_a_taken_place_are_refused(directory, no_child, tmp_path):
    shutil.copy(directory / "qwen3_tied" / "config.json", tmp_path)
    with pytest.raises(ValueError, match="only safetensors is read"):
        hf_to_checkpoint(tmp_path, tmp_path / "out")
    (tmp_path / "out" / "step-000000").mkdir(parents=True)
    with pytest.raises(ValueError, match="step-000000 exists already"):
        hf_to_checkpoint(directory / "qwen3_tied", tmp_path / "out")


def test_the_commands_say_where_it_went(directory, monkeypatch, tmp_path):
    calls = []
    child = "megatron_credit.mcore.conversion.in_child"
    monkeypatch.setattr(child, lambda *given: calls.append(given))
    model, checkpoint = str(directory / "qwen3_odd_vocab"), str(directory / "tp2" / "step-000001")
    options = ["--dtype", "bf16", "--optimizer", "sgd"]
    result = CliRunner().invoke(
        app, ["convert", "hf-to-mcore", model, str(tmp_path / "out"), *options]
    )
    assert result.exit_code == 0 and "out/step-000000" in result.output.replace("\n", "")
    arguments = ["convert", "mcore-to-hf", checkpoint, "--model", model, str(tmp_path / "hf")]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert [given[-2:] for given in calls] == [("bf16", "sgd"), (tmp_path / "hf", "auto")]
    result = CliRunner().invoke(app, [*arguments[:-1], model])
    assert result.exit_code == 2 and "exists already" in result.output


def test_a_run_accepts_a_converted_checkpoint(directory):
    """It knows no questions yet, so the run has to be told that it may bring its own."""
    model, checkpoint = directory / "qwen3_odd_vocab", directory / "accepted" / "step-000000"
    shutil.copytree(directory / "tp2" / "step-000001", checkpoint)
    manifest = read_manifest(checkpoint, {})
    assert manifest["identity"]["data"] == ""
    config = RunConfig.model_validate(
        {
            "run": {"directory": directory / "run", "resume": checkpoint},
            "task": {},
            "policy": {"model": model},
            "sampling": {"max_new_tokens": 8},
            "trainer": {"steps": 1},
        }
    )
    start = find_start(config, RunDirectory(config.run.directory), questions={"fingerprint": "f"})
    assert start.checkpoint == checkpoint


@pytest.mark.parametrize("kind", ["flipped", "planted_file", *BOMBS])
def test_a_checkpoint_that_was_tampered_with_leaves_nothing(directory, tmp_path, kind):
    """What `convert`, `eval --checkpoint` and the credit benchmark read weights with."""
    source = Path(shutil.copytree(directory / "tp2" / "step-000001", tmp_path / "step-000001"))
    damage(source, kind)
    with pytest.raises(ValueError, match=re.escape(DAMAGES[kind])):
        checkpoint_to_hf(source, directory / "qwen3_odd_vocab", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001"]


@pytest.mark.parametrize("place", ["pytorch_model.bin", "model.safetensors"])
def test_a_pickle_in_a_model_directory_is_never_opened(directory, tmp_path, place):
    """How the policy, a teacher of its own and `convert` read a Hugging Face directory."""
    model = Path(shutil.copytree(directory / "qwen3_tied", tmp_path / "model"))
    (model / "model.safetensors").unlink()
    (model / place).write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    reason = "only safetensors is read" if place.endswith(".bin") else "model.safetensors"
    with pytest.raises(ValueError, match=reason):
        open_checkpoint(model)("model.norm.weight")
    assert not (tmp_path / "exploded").exists()
