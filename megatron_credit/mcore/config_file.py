"""A Hugging Face config.json, read with errors that name file and field; light to import."""

import json
import math
from pathlib import Path
from typing import Any


class ConfigFile:
    """config.json of a model directory. A field that is null counts as missing.

    Every look-up raises ValueError, with the file and the field, for a value of the wrong kind, and
    for a missing one unless a default is given.
    """

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
            self.fields = json.loads(self.path.read_bytes())
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{self.path} is not JSON: {error}") from error
        if not isinstance(self.fields, dict):
            raise ValueError(f"{self.path} holds {type(self.fields).__name__}, expected an object")

    def refusal(self, field: str, problem: str) -> ValueError:
        """The error that says what is wrong with `field`."""
        return ValueError(f"{self.path}: {field} {problem}")

    def has(self, field: str) -> bool:
        """Whether the file states `field`."""
        return self.fields.get(field) is not None

    def value(self, field: str, default: Any = None) -> Any:
        """What the file states, of any kind."""
        if self.has(field):
            return self.fields[field]
        if default is None:
            raise self.refusal(field, "is missing; the checkpoint's config.json must state it")
        return default

    def text(self, field: str, default: str | None = None) -> str:
        """A string."""
        value = self.value(field, default)
        if not isinstance(value, str):
            raise self.refusal(field, f"is {value!r}, expected text")
        return value

    def count(self, field: str, default: int | None = None) -> int:
        """A positive whole number."""
        return self.as_count(field, self.value(field, default))

    def number(self, field: str, default: float | None = None) -> float:
        """A positive, finite number."""
        return self.as_number(field, self.value(field, default))

    def switch(self, field: str, default: bool | None = None) -> bool:
        """True or false."""
        value = self.value(field, default)
        if not isinstance(value, bool):
            raise self.refusal(field, f"is {value!r}, expected true or false")
        return value

    def table(self, field: str) -> dict[str, Any]:
        """An object; empty where it is missing."""
        value = self.value(field, {})
        if not isinstance(value, dict):
            raise self.refusal(field, f"is {value!r}, expected an object")
        return value

    def as_count(self, field: str, value: Any) -> int:
        """`value`, found at `field`, as `count` would give it."""
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refusal(field, f"is {value!r}, expected a positive whole number")
        return value

    def as_number(self, field: str, value: Any) -> float:
        """`value`, found at `field`, as `number` would give it."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value <= 0:
            raise self.refusal(field, f"is {value!r}, expected a positive number")
        return float(value)
