"""Writes the reference of all configuration keys from the models themselves.

python -m megatron_credit.trainer.reference > docs/configuration.md
"""

import json
import sys
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.load_config import section_types


def reference() -> str:
    """The Markdown text: one table a section."""
    lines = [
        "# Configuration",
        "",
        "Made by `python -m megatron_credit.trainer.reference`; `tests/trainer/test_reference.py`",
        "checks that it is current. Unknown keys are refused.",
    ]
    places: dict[type[BaseModel], list[str]] = {}
    for name, model in sections(RunConfig, ""):
        places.setdefault(model, []).append(f"[{name}]")
    for model, names in places.items():
        lines += ["", f"## {', '.join(names)}{kind(model)}", "", one_line(model.__doc__ or ""), ""]
        lines += ["| key | type | default | meaning |", "|---|---|---|---|", *rows(model)]
    return "\n".join(lines) + "\n"


def sections(owner: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """(dotted name, model) of every section below a model, depth first; all kinds of a choice."""
    for name, field in owner.model_fields.items():
        for model in section_types(field.annotation):
            yield prefix + name, model
            yield from sections(model, f"{prefix}{name}.")


def kind(model: type[BaseModel]) -> str:
    """Which of several alternatives the section is, where there are some."""
    field = model.model_fields.get("kind")
    choices = get_args(field.annotation) if field else ()
    return f" of kind {choices[0]}" if len(choices) == 1 else ""


def rows(model: type[BaseModel]) -> Iterator[str]:
    """A row for each key of a section."""
    for name, field in model.model_fields.items():
        meaning = one_line(field.description or "").replace("|", "\\|")
        yield f"| `{name}` | {type_name(field)} | {default(field)} | {meaning} |"


def type_name(field: FieldInfo) -> str:
    """The annotation without module names; `table` where the key is a section of its own."""
    if section_types(field.annotation):
        return "table"
    annotation = field.annotation
    plain = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    for noise in ("typing.", "pathlib.", "NoneType"):
        plain = plain.replace(noise, "")
    return f"`{plain}`".replace("|", "\\|")


def default(field: FieldInfo) -> str:
    """The default as TOML would have it, or that there is none."""
    if field.default_factory is not None:
        return "empty"
    return "needed" if field.default is PydanticUndefined else f"`{shown(field.default)}`"


def shown(value: Any) -> str:
    """A default in TOML's spelling."""
    if value is None:
        return "unset"
    if isinstance(value, BaseModel):
        return "its defaults"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and not value.isprintable():
        return json.dumps(value)
    return str(list(value) if isinstance(value, tuple) else value)


def one_line(text: str) -> str:
    """Text without its line breaks."""
    return " ".join(text.split())


if __name__ == "__main__":
    sys.stdout.write(reference())
