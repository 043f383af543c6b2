"""How a checkpoint stretches its rotary positions: read from config.json; light to import.

The kinds are those whose frequencies do not depend on the sequence: each token then has the same
rotation in training, in scoring and in the engine.
"""

import math
from dataclasses import dataclass
from typing import Any

from megatron_credit.mcore.config_file import ConfigFile


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Every frequency divided by `factor`."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, those between blended (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    """Frequencies of fewer than this many turns over the original window are low."""
    high_freq_factor: float
    """Frequencies of more than this many turns over the original window are high."""
    original_positions: int
    """The window, in tokens, of the training before the stretch."""


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """Frequencies blended over a ramp of dimensions (2309.00071)."""

    factor: float
    original_positions: int
    """The window, in tokens, of the training before the stretch."""
    beta_fast: float
    """Turns over the original window at which the ramp begins."""
    beta_slow: float
    """Turns over the original window at which the ramp ends."""
    truncate: bool
    """The ramp begins and ends at whole dimensions."""
    attention_factor: float
    """Scale of the rotated queries and of the rotated keys: scores grow by its square."""


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling

_DEFAULT_THETA = 10_000.0
_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_OPTIONS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "finetuned",  # says how the checkpoint was made; nothing reads it
    },
}
_REFUSED = {
    "dynamic": "rotates a token differently in a longer sequence, so packing, caching and "
    "training would disagree",
    "longrope": "has one set of frequencies for short and one for long sequences, so the engine's "
    "cached tokens and the trainer's would disagree",
}


def read_rope(file: ConfigFile) -> tuple[float, RopeScaling | None]:
    """The base of the rotary frequencies and their scaling; ValueError for an unsupported one.

    They stand in `rope_parameters` since transformers 5, before that in `rope_scaling` and at the
    top level.
    """
    field = _place(file)
    options = {name: value for name, value in file.table(field).items() if value is not None}
    kind = _kind(file, field, options)
    _refuse_partial(file, field, options)
    reader = _Reader(file, field, options)
    theta = reader.number("rope_theta", file.number("rope_theta", _DEFAULT_THETA))
    return theta, reader.scaling(kind)


def max_positions(file: ConfigFile, scaling: RopeScaling | None) -> int:
    """Longest sequence, in tokens, that the checkpoint declares, as vLLM reads it."""
    declared = file.count("max_position_embeddings")
    match scaling:
        case LinearScaling(factor=factor):
            return int(declared * factor)
        case YarnScaling(factor=factor, original_positions=original):
            return min(declared, int(original * factor))
        case _:
            return declared


def _place(file: ConfigFile) -> str:
    old, new = file.table("rope_scaling"), file.table("rope_parameters")
    if old and new and old != new:
        raise file.refusal(
            "rope_scaling", f"is {old} and rope_parameters is {new}; keep the one that is meant"
        )
    return "rope_scaling" if old else "rope_parameters"


def _kind(file: ConfigFile, field: str, options: dict[str, Any]) -> str:
    kind = options.get("rope_type", options.get("type", "default"))
    if kind not in _OPTIONS:
        reason = _REFUSED.get(kind) if isinstance(kind, str) else None
        raise file.refusal(
            field,
            f"has type {kind!r}, which {reason or 'is not supported'}; "
            f"supported types: {', '.join(_OPTIONS)}",
        )
    unknown = sorted(set(options) - _COMMON - _OPTIONS[kind])
    if unknown:
        raise file.refusal(field, f"has {unknown}, which type {kind!r} does not know")
    return kind


def _refuse_partial(file: ConfigFile, field: str, options: dict[str, Any]) -> None:
    places = {
        "partial_rotary_factor": file.fields.get("partial_rotary_factor"),
        f"{field}.partial_rotary_factor": options.get("partial_rotary_factor"),
    }
    for place, fraction in places.items():
        if fraction not in (None, 1, 1.0):
            raise file.refusal(place, f"is {fraction!r}, expected 1: every dimension is rotated")


@dataclass(frozen=True)
class _Reader:
    """Makes a scaling of the options found at `field`."""

    file: ConfigFile
    field: str
    options: dict[str, Any]

    def scaling(self, kind: str) -> RopeScaling | None:
        match kind:
            case "linear":
                return LinearScaling(factor=self.number("factor"))
            case "llama3":
                return self.llama3()
            case "yarn":
                return self.yarn()
            case _:
                return None

    def llama3(self) -> Llama3Scaling:
        low, high = self.number("low_freq_factor"), self.number("high_freq_factor")
        if high <= low:
            raise self.file.refusal(
                f"{self.field}.high_freq_factor", f"is {high}, expected more than {low}"
            )
        return Llama3Scaling(
            factor=self.number("factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_positions=self.original_positions(),
        )

    def yarn(self) -> YarnScaling:
        truncate = self.options.get("truncate", True)
        if not isinstance(truncate, bool):
            raise self.file.refusal(
                f"{self.field}.truncate", f"is {truncate!r}, expected true or false"
            )
        factor = self.number("factor")
        return YarnScaling(
            factor=factor,
            original_positions=self.original_positions(),
            beta_fast=self.number("beta_fast", 32.0),
            beta_slow=self.number("beta_slow", 1.0),
            truncate=truncate,
            attention_factor=self.number("attention_factor", self.inferred_attention(factor)),
        )

    def inferred_attention(self, factor: float) -> float:
        """transformers' rule: DeepSeek's ratio where both scales are given, else YaRN's."""
        if "mscale" in self.options and "mscale_all_dim" in self.options:
            numerator = _attention_scale(factor, self.number("mscale"))
            return numerator / _attention_scale(factor, self.number("mscale_all_dim"))
        return _attention_scale(factor, 1.0)

    def original_positions(self) -> int:
        """ValueError where the top level states another window than the scaling does."""
        name = "original_max_position_embeddings"
        found = {
            value
            for value in (self.options.get(name), self.file.fields.get(name))
            if value is not None
        }
        if len(found) > 1:
            raise self.file.refusal(
                name, f"differs from {self.field}.{name}: {sorted(found)}; keep the one meant"
            )
        default = self.file.count("max_position_embeddings")
        return self.file.as_count(f"{self.field}.{name}", found.pop() if found else default)

    def number(self, name: str, default: float | None = None) -> float:
        value = self.options.get(name, default)
        if value is None:
            raise self.file.refusal(f"{self.field}.{name}", "is missing")
        return self.file.as_number(f"{self.field}.{name}", value)


def _attention_scale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
