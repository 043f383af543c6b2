"""The base of every configuration section: closed, frozen, and each field documented in place."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """A configuration section: unknown keys are refused and nothing changes after parsing."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )
