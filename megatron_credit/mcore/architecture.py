"""What a model is: read from a Hugging Face config.json, checked against a parallel layout.

Only what is computed exactly as the checkpoint's authors meant it is accepted. Light to import.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_credit.mcore.config import ParallelConfig

Family = Literal["qwen3", "qwen2", "llama"]
FAMILIES: tuple[Family, ...] = ("qwen3", "qwen2", "llama")


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes and switches of a dense or mixture-of-experts decoder with rotary positions, RMSNorm,
    grouped-query attention and a gated SiLU feed-forward."""

    family: Family
    num_layers: int
    hidden_size: int
    ffn_size: int
    """Width of a dense feed-forward between its matrices."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    """Longest sequence, in tokens, that the checkpoint declares."""
    rope_theta: float
    norm_eps: float
    tied_embeddings: bool
    """The output weight is the embedding."""
    qkv_bias: bool
    qk_norm: bool
    """RMSNorm over each query and key head."""
    num_experts: int = 0
    """0: dense."""
    experts_per_token: int = 0
    expert_ffn_size: int = 0

    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits that differ where any field differs."""
        fields = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(fields.encode()).hexdigest()[:16]


def read_architecture(model_dir: Path) -> Architecture:
    """The architecture that `model_dir`/config.json describes.

    ValueError names the file and the field: no such directory or file, a missing or mistyped field,
    or something that would be computed differently here (other families, sliding windows, scaled
    rotary positions, quantised weights, biases the family does not usually have).
    """
    file = _ConfigFile(model_dir)
    family = file.text("model_type")
    if family not in FAMILIES:
        raise file.refusal(
            "model_type", f"is {family!r}; supported model types: {', '.join(FAMILIES)}"
        )
    _refuse_unsupported(file, family)
    heads = file.count("num_attention_heads")
    hidden = file.count("hidden_size")
    architecture = Architecture(
        family=family,
        num_layers=file.count("num_hidden_layers"),
        hidden_size=hidden,
        ffn_size=file.count("intermediate_size"),
        num_heads=heads,
        num_kv_heads=file.count("num_key_value_heads"),
        head_dim=file.count("head_dim") if file.has("head_dim") else hidden // heads,
        vocab_size=file.count("vocab_size"),
        max_positions=file.count("max_position_embeddings"),
        rope_theta=_rope_theta(file),
        norm_eps=file.number("rms_norm_eps"),
        tied_embeddings=file.switch("tie_word_embeddings"),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    )
    _check_heads(file, architecture)
    return architecture


class _ConfigFile:
    """config.json with typed look-ups that name the file and the field in every error."""

    def __init__(self, model_dir: Path) -> None:
        self.path = model_dir / "config.json"
        if not model_dir.is_dir():
            raise ValueError(
                f"model directory {model_dir} is not a directory; give a Hugging Face model "
                "directory with config.json and safetensors files"
            )
        if not self.path.is_file():
            raise ValueError(f"{self.path} does not exist; a Hugging Face model directory has one")
        try:
            self.fields = json.loads(self.path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{self.path} is not JSON: {error}") from error
        if not isinstance(self.fields, dict):
            raise ValueError(f"{self.path} holds {type(self.fields).__name__}, expected an object")

    def refusal(self, field: str, problem: str) -> ValueError:
        return ValueError(f"{self.path}: {field} {problem}")

    def has(self, field: str) -> bool:
        return self.fields.get(field) is not None

    def value(self, field: str) -> Any:
        if not self.has(field):
            raise self.refusal(field, "is missing; the checkpoint's config.json must state it")
        return self.fields[field]

    def text(self, field: str) -> str:
        value = self.value(field)
        if not isinstance(value, str):
            raise self.refusal(field, f"is {value!r}, expected text")
        return value

    def count(self, field: str) -> int:
        value = self.value(field)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refusal(field, f"is {value!r}, expected a positive whole number")
        return value

    def number(self, field: str) -> float:
        return _positive(self, field, self.value(field))

    def switch(self, field: str) -> bool:
        value = self.value(field)
        if not isinstance(value, bool):
            raise self.refusal(field, f"is {value!r}, expected true or false")
        return value


def _positive(file: _ConfigFile, field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise file.refusal(field, f"is {value!r}, expected a positive number")
    return float(value)


def _refuse_unsupported(file: _ConfigFile, family: str) -> None:
    if file.has("quantization_config"):
        raise file.refusal(
            "quantization_config", "is set; only unquantised checkpoints can be trained"
        )
    activation = file.text("hidden_act")
    if activation != "silu":
        raise file.refusal("hidden_act", f"is {activation!r}, expected 'silu'")
    for field in ("attention_bias", "mlp_bias"):
        if file.has(field) and file.switch(field):
            raise file.refusal(field, f"is true, which is not supported for {family}")
    _refuse_sliding_window(file, family)
    fraction = file.fields.get("partial_rotary_factor")
    if fraction not in (None, 1, 1.0):
        raise file.refusal("partial_rotary_factor", f"is {fraction!r}, expected 1")


def _refuse_sliding_window(file: _ConfigFile, family: str) -> None:
    problem = "asks for a sliding window, which is not supported; only full attention is"
    if file.has("use_sliding_window") and file.switch("use_sliding_window"):
        raise file.refusal("use_sliding_window", problem)
    # The Qwen families state a window size that use_sliding_window = false leaves unused.
    if family == "llama" and file.has("sliding_window"):
        raise file.refusal("sliding_window", problem)
    kinds = set(file.fields.get("layer_types") or ())
    if kinds - {"full_attention"}:
        raise file.refusal("layer_types", f"has {sorted(kinds)}; only full_attention is supported")


def _rope_theta(file: _ConfigFile) -> float:
    """The base of the rotary frequencies: in `rope_parameters` since transformers 5, else at the
    top level."""
    for field in ("rope_scaling", "rope_parameters"):
        parameters = file.fields.get(field)
        if parameters is None:
            continue
        if not isinstance(parameters, dict):
            raise file.refusal(field, f"is {parameters!r}, expected an object")
        _refuse_scaling(file, field, parameters)
        if "rope_theta" in parameters:
            return _positive(file, f"{field}.rope_theta", parameters["rope_theta"])
    return file.number("rope_theta")


def _refuse_scaling(file: _ConfigFile, field: str, parameters: dict[str, Any]) -> None:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise file.refusal(field, f"has type {kind!r}; scaled rotary positions are not supported")
    others = sorted(set(parameters) - {"rope_type", "type", "rope_theta", "partial_rotary_factor"})
    if others:
        raise file.refusal(field, f"has {others}, which are not supported")
    if parameters.get("partial_rotary_factor", 1) != 1:
        raise file.refusal(f"{field}.partial_rotary_factor", "must be 1")


def _check_heads(file: _ConfigFile, architecture: Architecture) -> None:
    heads, kv_heads = architecture.num_heads, architecture.num_kv_heads
    if heads % kv_heads:
        raise file.refusal(
            "num_key_value_heads",
            f"is {kv_heads}, which does not divide num_attention_heads={heads}",
        )
    if not file.has("head_dim") and architecture.hidden_size % heads:
        raise file.refusal(
            "head_dim",
            f"is missing and hidden_size={architecture.hidden_size} is no multiple of "
            f"num_attention_heads={heads}",
        )
    if architecture.head_dim % 2:
        raise file.refusal(
            "head_dim", f"is {architecture.head_dim}; rotary positions need an even one"
        )


def padded_vocab_size(architecture: Architecture, tensor: int) -> int:
    """The vocabulary rounded up to a multiple of `tensor`, so that every tensor rank holds equally
    many rows. Rows from `vocab_size` on are padding: zero, never exported."""
    return -(-architecture.vocab_size // tensor) * tensor


def data_parallel_size(parallel: ParallelConfig, world_size: int) -> int:
    """Number of model replicas; ValueError where the world is no multiple of one replica."""
    replica = parallel.tensor * parallel.pipeline * parallel.context
    if world_size % replica:
        raise ValueError(
            f"{world_size} processes cannot hold whole replicas of tensor={parallel.tensor} x "
            f"pipeline={parallel.pipeline} x context={parallel.context} = {replica} processes; "
            f"start a multiple of {replica}"
        )
    return world_size // replica


def check_parallel(architecture: Architecture, parallel: ParallelConfig, world_size: int) -> None:
    """ValueError, with the formula and the valid values, where the model cannot be split so."""
    data = data_parallel_size(parallel, world_size)
    tensor = parallel.tensor
    for name, size in (
        ("num_heads", architecture.num_heads),
        ("num_kv_heads", architecture.num_kv_heads),
        ("ffn_size", architecture.ffn_size),
    ):
        _check_divides("tensor", tensor, name, size)
    _check_divides(
        "pipeline x virtual_pipeline",
        parallel.pipeline * parallel.virtual_pipeline,
        "num_layers",
        architecture.num_layers,
    )
    if parallel.sequence_parallel:
        _check_divides("tensor", tensor, "hidden_size", architecture.hidden_size)
    _check_experts(architecture, parallel, tensor * parallel.context * data)


def _check_experts(architecture: Architecture, parallel: ParallelConfig, ranks: int) -> None:
    if architecture.num_experts == 0:
        if parallel.expert > 1:
            raise ValueError(
                f"expert={parallel.expert}, but the model has no experts; set expert = 1"
            )
        return
    _check_divides("expert", parallel.expert, "num_experts", architecture.num_experts)
    _check_divides("expert", parallel.expert, "tensor x context x data", ranks)
    if parallel.tensor > 1 and not parallel.sequence_parallel:
        raise ValueError(
            f"tensor={parallel.tensor} with experts needs sequence_parallel = true, got false"
        )


def _check_divides(axis: str, size: int, name: str, total: int) -> None:
    if total % size:
        valid = [number for number in range(1, total + 1) if total % number == 0]
        raise ValueError(
            f"{axis}={size} does not divide {name}={total}; use one of {_abridged(valid)}"
        )


def _abridged(numbers: list[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:12])
    return shown + (", ..." if len(numbers) > 12 else "")
