"""Hugging Face model directories: safetensors in and out."""

import json
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_CONFIG = "config.json"
_EMBEDDING = "model.embed_tokens.weight"
_OUTPUT = "lm_head.weight"
# What else a model directory may hold that goes with the weights.
_COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
# transformers 5 keeps the experts of a layer in two tensors, [E, gate and up, H] and [E, H, down],
# and writes them so when asked not to restore the published format.
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_FUSED = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}
_DTYPE_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


def open_checkpoint(model_dir: Path) -> Callable[[str], Tensor]:
    """A function from a tensor's name to the full tensor, on the CPU, in its stored dtype.

    Reads one tensor at a time, from one safetensors file or from those of an index. An expert's
    tensor is also found where all experts of its layer are one. ValueError: the directory has no
    such file, or (when called) the checkpoint has no tensor of that name.
    """
    file_of = _locate_tensors(model_dir)
    handles: dict[str, Any] = {}

    def handle(name: str) -> Any:
        path = model_dir / file_of[name]
        if path.name not in handles:
            handles[path.name] = _opened(path)
        return handles[path.name]

    def read(name: str) -> Tensor:
        if name in file_of:
            return handle(name).get_tensor(name)
        match = _EXPERT.fullmatch(name)
        if match is not None:
            _, number, part = match.groups()
            fused = _fused_name(match)
            if fused in file_of:
                return _expert_part(handle(fused).get_slice(fused)[int(number)], part)
        raise ValueError(f"the checkpoint {model_dir} has no tensor {name}")

    return read


def tensor_names(model_dir: Path) -> list[str]:
    """Names of all tensors of the checkpoint, sorted. ValueError as in `open_checkpoint`."""
    return sorted(_locate_tensors(model_dir))


def refuse_unread(model_dir: Path, read: Collection[str]) -> None:
    """ValueError where the checkpoint has tensors besides those that were `read`: the model is then
    another one than its config.json says, with biases for example.

    Copies of rotary frequencies do no harm, nor does an output weight that equals the embedding.
    """
    matches = (_EXPERT.fullmatch(name) for name in read)
    fused = {_fused_name(match) for match in matches if match is not None}
    unread = set(tensor_names(model_dir)) - set(read) - fused
    unread = {name for name in unread if not name.endswith(".rotary_emb.inv_freq")}
    if _OUTPUT in unread and _EMBEDDING in read:
        tensor = open_checkpoint(model_dir)
        if torch.equal(tensor(_OUTPUT), tensor(_EMBEDDING)):
            unread.remove(_OUTPUT)
    if unread:
        names = sorted(unread)
        raise ValueError(
            f"the checkpoint {model_dir} has {len(names)} tensors that the model of its "
            f"config.json has no place for: {', '.join(names[:5])}; correct config.json, or delete "
            "them if they do not belong to the model"
        )


def write_checkpoint(
    directory: Path,
    tensors: Iterable[tuple[str, Tensor]],
    source_dir: Path,
    *,
    max_file_bytes: int = 4 * 2**30,
) -> None:
    """Writes a Hugging Face model directory: `tensors`, and the configuration and tokenizer files
    of `source_dir`.

    The directory appears complete or not at all. At most one file's worth of tensors is held in
    memory. config.json states the dtype that was written. ValueError: `directory` exists already.
    For one rank to call; the others must run the same collective iterator to its end.
    """
    if directory.exists():
        raise ValueError(f"{directory} exists already; give a new directory for the checkpoint")
    unfinished = directory.with_name(f".{directory.name}.unfinished")
    # Left behind by a process that died while it wrote.
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    dtypes = _write_tensors(unfinished, tensors, max_file_bytes)
    _write_config(unfinished, source_dir, dtypes)
    for name in _COMPANIONS:
        if (source_dir / name).is_file():
            shutil.copyfile(source_dir / name, unfinished / name)
    unfinished.rename(directory)


def _fused_name(match: re.Match[str]) -> str:
    """Name of the tensor that holds the matched part of every expert of the layer."""
    experts, _, part = match.groups()
    return f"{experts}.{_FUSED[part]}"


def _expert_part(fused: Tensor, part: str) -> Tensor:
    """The gate, up or down matrix of an expert from the tensor that holds it."""
    if part == "down":
        return fused
    gate, up = fused.chunk(2)
    return gate if part == "gate" else up


def _locate_tensors(model_dir: Path) -> dict[str, str]:
    """File name of every tensor."""
    index, single = model_dir / _INDEX, model_dir / _SINGLE
    if index.is_file():
        file_of = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        missing = sorted(name for name in set(file_of.values()) if not (model_dir / name).is_file())
        if missing:
            raise ValueError(f"{index} names files that do not exist: {', '.join(missing)}")
        return file_of
    if not single.is_file():
        raise ValueError(
            f"{model_dir} has neither {_SINGLE} nor {_INDEX}; only safetensors is read"
        )
    return dict.fromkeys(_opened(single).keys(), _SINGLE)


def _opened(path: Path) -> Any:
    """The tensors of a safetensors file; ValueError where it is none, or cut."""
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is no whole safetensors file: {error}") from None


def _write_tensors(
    directory: Path, tensors: Iterable[tuple[str, Tensor]], max_bytes: int
) -> set[torch.dtype]:
    written: list[list[str]] = []
    dtypes: set[torch.dtype] = set()
    total = 0
    for batch in _batches(tensors, max_bytes):
        part = directory / f"part-{len(written)}"
        save_file(batch, part, metadata={"format": "pt"})
        part.chmod(0o644)  # safetensors makes its files private
        written.append(list(batch))
        dtypes |= {tensor.dtype for tensor in batch.values()}
        total += sum(tensor.nbytes for tensor in batch.values())
    _name_files(directory, written, total)
    return dtypes


def _batches(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    batch: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if batch and size + tensor.nbytes > max_bytes:
            yield batch
            batch, size = {}, 0
        # A copy: tensors may be views of parameters, or of one another.
        batch[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        size += tensor.nbytes
    yield batch


def _name_files(directory: Path, written: list[list[str]], total_bytes: int) -> None:
    """Gives the parts the names that transformers expects, which hold their number."""
    if len(written) == 1:
        (directory / "part-0").rename(directory / _SINGLE)
        return
    file_of = {}
    for number, names in enumerate(written):
        file_name = f"model-{number + 1:05d}-of-{len(written):05d}.safetensors"
        (directory / f"part-{number}").rename(directory / file_name)
        file_of |= dict.fromkeys(names, file_name)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": file_of}
    (directory / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_config(directory: Path, source_dir: Path, dtypes: set[torch.dtype]) -> None:
    config = json.loads((source_dir / _CONFIG).read_text(encoding="utf-8"))
    if len(dtypes) == 1:
        # Readers convert to the stated dtype; that of the source would round these weights.
        config.pop("torch_dtype", None)
        config["dtype"] = _DTYPE_NAMES[dtypes.pop()]
    (directory / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
