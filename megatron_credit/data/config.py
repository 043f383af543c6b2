"""Configuration of the user's data: files, columns, weights and filters; light to import."""

from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from megatron_credit.rewards.config import AnyVerifierConfig, PoolConfig, VerifierConfig
from megatron_credit.settings import Settings


class ColumnsConfig(Settings):
    """Which column holds what; a dot reaches into a nested one, as in reward_model.ground_truth."""

    prompt: str = "prompt"
    """The question: a text, or a list of chat messages. Empty: there is none."""
    messages: str = "messages"
    """Chat messages, a list of {role, content}; a row has either a prompt or messages. Empty: there
    is none."""
    answer: str = "answer"
    """The reference answer, a text or a number. Empty: rows have none and the verifier needs
    none."""
    id: str = "id"
    """A text or a whole number, unique in its source. A row without one is known by its row number;
    a column of another name must exist. Empty: go by row numbers."""
    metadata: str | tuple[str, ...] = "metadata"
    """What the verifier may need besides: a column with an object or the JSON text of one, or a
    list of columns to copy. A column of another name must exist. Empty: there is none."""

    @model_validator(mode="after")
    def _has_a_question(self) -> Self:
        if not self.prompt and not self.messages:
            raise ValueError("columns.prompt and columns.messages are both empty; name one of them")
        if self.prompt == self.messages:
            raise ValueError(
                f"columns.prompt and columns.messages are both {self.prompt!r}; set "
                'columns.messages = "", since columns.prompt may hold a text or messages'
            )
        return self

    @property
    def top_level(self) -> frozenset[str]:
        """The columns of a file in which any of these may lie."""
        metadata = (self.metadata,) if isinstance(self.metadata, str) else self.metadata
        named = {self.prompt, self.messages, self.answer, self.id, *metadata} - {""}
        return frozenset(named | {name.partition(".")[0] for name in named})


def _named(value: Any) -> Any:
    """A source's table with its name filled in; a plain string is its path."""
    if isinstance(value, str | Path):
        value = {"path": value}
    if isinstance(value, dict) and "path" in value and "name" not in value:
        path = Path(str(value["path"]))
        is_pattern = any(sign in path.name for sign in "*?[")
        return value | {"name": (path.parent.name or "data") if is_pattern else path.stem}
    return value


class SourceConfig(Settings):
    """Files of one origin, which are mixed and reported together."""

    path: Path
    """A .jsonl, .json, .parquet or .arrow file, or a pattern such as data/*.parquet."""
    name: str = Field(min_length=1)
    """How reports call it; by default the file's name without its ending, or for a pattern the
    directory's name."""
    weight: float = Field(1.0, gt=0)
    """Share of the training prompts, relative to the other sources' weights."""
    columns: ColumnsConfig = ColumnsConfig()
    """Where its rows keep what."""
    verifier: VerifierConfig | None = None
    """What checks its answers, if not `data.verifier`."""


def _listed(value: Any) -> Any:
    """One or many sources, strings or tables, as a list of tables."""
    if isinstance(value, SourceConfig):
        return (value,)
    sources = [value] if isinstance(value, str | Path | dict) else value
    if not isinstance(sources, list | tuple):
        return value
    return tuple(map(_named, sources))


Sources = Annotated[tuple[SourceConfig, ...], BeforeValidator(_listed)]


class DataConfig(Settings):
    """Prompts to train on and prompts to evaluate on, from files."""

    train: Sources = Field(min_length=1)
    """A path, a list of paths, or tables with path, name, weight, columns and verifier."""
    eval: Sources = ()
    """Held-out prompts, in the same forms. A training row with the same question is dropped."""
    eval_size: int = Field(0, ge=0)
    """Without `eval`: this many training prompts are held out instead."""
    eval_seed: int = Field(0, ge=0)
    """Which ones `eval_size` holds out; apart from run.seed, so that runs which differ in that are
    compared on the same prompts."""
    verifier: VerifierConfig | None = None
    """What checks the answers of each source that does not say it itself."""
    verifier_pool: PoolConfig = PoolConfig()
    """The processes in which answers are checked."""
    on_bad_row: Literal["stop", "skip"] = "stop"
    """stop: refuse to start while a row is malformed; skip: leave such rows out and count them."""
    system_prompt: str | None = Field(None, min_length=1)
    """System message put before each prompt; a row that brings its own is then malformed."""
    thinking: bool | None = None
    """Turns the thinking mode of the chat template on or off; unset: the template's default."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Longer prompts are left out and counted; unset: none are."""
    max_row_bytes: int = Field(10_000_000, ge=1)
    """A row with more bytes than this is malformed."""

    @model_validator(mode="after")
    def _sources_agree(self) -> Self:
        sources = (*self.train, *self.eval)
        name, count = Counter(source.name for source in sources).most_common(1)[0]
        if count > 1:
            raise ValueError(
                f"{count} sources are called {name!r}, so reports could not tell them apart; give "
                'each a name, as in train = [{path = "..", name = ".."}]'
            )
        if self.eval and self.eval_size:
            raise ValueError(
                f"eval_size = {self.eval_size} holds out training prompts, but eval names files of "
                "held-out prompts; keep one of the two"
            )
        lacking = [source.name for source in sources if source.verifier is None]
        if lacking and self.verifier is None:
            raise ValueError(
                f'nothing checks the answers of {", ".join(lacking)}; set verifier = "math" or '
                "another kind, for all or in the source's table"
            )
        return self

    def verifier_of(self, source: SourceConfig) -> AnyVerifierConfig:
        """What checks the answers of a source."""
        verifier = source.verifier or self.verifier
        assert verifier is not None, "_sources_agree looked"
        return verifier
