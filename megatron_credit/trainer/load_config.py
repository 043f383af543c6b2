"""From a TOML file and dotted overrides to a `RunConfig`, or to one readable error."""

import difflib
import tomllib
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from megatron_credit.trainer.config import RunConfig


class ConfigError(ValueError):
    """The configuration is not usable; the message says what to change."""


def load_config(path: Path, overrides: list[str]) -> RunConfig:
    """The configuration of `path` with `section.key=value` overrides applied.

    Raises ConfigError: missing file, malformed TOML, unknown key (with the nearest name), wrong
    type, sections that contradict each other.
    """
    return parse_config(read_toml(path), overrides, source=str(path))


def parse_config(tree: dict[str, Any], overrides: list[str], *, source: str) -> RunConfig:
    """As `load_config`, from a parsed TOML tree; `source` names it in errors."""
    for override in overrides:
        apply_override(tree, override)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        lines = [f"{source}: not a valid configuration", *map(describe, error.errors())]
        raise ConfigError("\n  ".join(lines)) from None


def read_toml(path: Path) -> dict[str, Any]:
    """The parsed file; raises ConfigError that names the file and the line."""
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.toml")], 3)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise ConfigError(f"no configuration file at {path.absolute()}{hint}")
    try:
        return tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Sets `a.b=value` in the tree; the value is TOML, or a bare string where it is not."""
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"override {override!r} is not of the form section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"override {override!r}: {key!r} is a value, not a section")
    tree[keys[-1]] = value


def describe(error: Any) -> str:
    """One line for one pydantic error: where, what came, what was expected."""
    where = [str(part) for part in error["loc"]]
    name = ".".join(where) or "configuration"
    if error["type"] == "extra_forbidden":
        known = field_names(RunConfig, where[:-1])
        near = difflib.get_close_matches(where[-1], known, 1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
        return f"{name}: unknown key; {hint}"
    if error["type"] == "missing":
        return f"{name}: missing; it has no default"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return message if name == "configuration" else f"{name}: {message}"
    return f"{name}: {message}, got {error['input']!r}"


def field_names(model: type[BaseModel], path: list[str]) -> list[str]:
    """Valid keys of the section at `path`; all alternatives of a union together."""
    models = [model]
    for part in path:
        models = [
            found
            for owner in models
            if part in owner.model_fields
            for found in section_types(owner.model_fields[part].annotation)
        ] or models  # a union's tag is no field: stay
    return sorted({name for found in models for name in found.model_fields})


def section_types(annotation: Any) -> list[type[BaseModel]]:
    """The pydantic models inside an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in typing.get_args(annotation) for found in section_types(part)]
