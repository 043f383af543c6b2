"""From a configuration to prompts: all sources read, leaks removed, the order fixed."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_credit.batch.rollout import Prompt
from megatron_credit.data.chat import template_options
from megatron_credit.data.config import DataConfig
from megatron_credit.data.fingerprint import digest_of
from megatron_credit.data.held_out import drop_leaks, drop_repeated, hold_out
from megatron_credit.data.order import Mixture, shuffled
from megatron_credit.data.problems import listing
from megatron_credit.data.report import DataReport
from megatron_credit.data.source import CheckReferences, LoadedSource, Vetting, read_source
from megatron_credit.data.store import PromptTable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptData:
    """Training prompts in their order, held-out prompts, and the report on both."""

    def __init__(
        self,
        train: Sequence[LoadedSource],
        held_out: Sequence[LoadedSource],
        *,
        template_options: dict[str, bool],
        fingerprint: str,
        seed: int,
    ) -> None:
        self._train = train
        self._held_out = held_out
        self._mixture = Mixture([source.config.weight for source in train])
        self._template_options = template_options
        self._seed = seed
        self._has_names = len({source.config.name for source in (*train, *held_out)}) > 1
        self.fingerprint = fingerprint
        self.report = DataReport(tuple(source.report for source in (*train, *held_out)))

    def train_prompt(self, index: int) -> Prompt:
        """Training prompt number `index`, from 0: each source goes through all its rows in a new
        order before one comes again."""
        if index < 0:
            raise ValueError(f"train_prompt got index {index}; prompts are numbered from 0")
        source, count = self._mixture.locate(index)
        table = self._train[source].table
        epoch, place = divmod(count, len(table))
        key = f"{self._seed}/{table.name}/{epoch}"
        return self._prompt(table, shuffled(place, len(table), key))

    def eval_prompts(self) -> list[Prompt]:
        """The held-out prompts, source by source in the order of their rows."""
        return [
            self._prompt(source.table, number)
            for source in self._held_out
            for number in range(len(source.table))
        ]

    def longest_prompts(self) -> list[Prompt]:
        """The longest prompt of each source."""
        return [
            self._prompt(source.table, int(source.column_R("num_tokens").argmax()))
            for source in (*self._train, *self._held_out)
        ]

    def _prompt(self, table: PromptTable, number: int) -> Prompt:
        source = table.name if self._has_names else ""
        return table.prompt(number, source=source, template_options=self._template_options)


def load_data(
    config: DataConfig,
    *,
    tokenizer: "PreTrainedTokenizerBase",
    check_references: CheckReferences,
    seed: int,
) -> PromptData:
    """Reads and vets all rows; `seed` decides the order of the training prompts.

    Raises ValueError that lists the malformed rows, or says which file or setting cannot be used.
    """
    options = template_options(tokenizer, config.thinking)
    train, held_out = read_all(config, Vetting(config, tokenizer, options, check_references))
    if config.eval_size:
        held_out = hold_out(train, config.eval_size, config.eval_seed)
    held_out = [drop_repeated(source) for source in held_out]
    train = [drop_leaks(source, held_out) for source in train]
    sources = (*train, *held_out)
    for source in sources:
        finish_report(source)
    choices = {"seed": seed, "system_prompt": config.system_prompt, "options": options}
    return PromptData(
        train,
        held_out,
        template_options=options,
        fingerprint=fingerprint(sources, choices),
        seed=seed,
    )


def read_all(
    config: DataConfig, vetting: Vetting
) -> tuple[list[LoadedSource], list[LoadedSource]]:
    """The training and the held-out sources; ValueError where malformed rows are to stop a run."""
    try:
        # The stores stay mapped into memory when their names are gone: nothing is left behind.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
            stores = Path(directory)
            train = [
                read_source(source, "train", vetting, stores / f"train-{number}.arrow")
                for number, source in enumerate(config.train)
            ]
            held_out = [
                read_source(source, "eval", vetting, stores / f"eval-{number}.arrow")
                for number, source in enumerate(config.eval)
            ]
    except OSError as error:
        raise ValueError(
            f"the prompts cannot be kept in {tempfile.gettempdir()}: {error}; set TMPDIR to a "
            "directory with room for them"
        ) from None
    bad = [source.report.bad for source in (*train, *held_out)]
    if config.on_bad_row == "stop" and any(rows.counts for rows in bad):
        raise ValueError(
            f"the data has malformed rows:\n{listing(bad)}\nMend them, or leave them out with "
            'data.on_bad_row = "skip"'
        )
    return train, held_out


def finish_report(source: LoadedSource) -> None:
    """Fills in what is left; raises ValueError when that is nothing."""
    report, table = source.report, source.table
    report.kept = len(table)
    if report.kept == 0:
        rows = f":\n{listing([report.bad])}" if report.bad.counts else ""
        raise ValueError(f"no row of data.{report.split} is left; {report}{rows}")
    report.longest = int(table.column_R("num_tokens").max())


def fingerprint(sources: Sequence[LoadedSource], choices: dict[str, Any]) -> str:
    """A digest of the files' bytes and of everything that decides which prompt comes when.

    Where the files lie does not count, nor why a row was left out.
    """
    read = [
        {
            "split": source.report.split,
            "name": source.config.name,
            "weight": source.config.weight,
            "columns": source.config.columns.model_dump(),
            "files": source.digests,
        }
        for source in sources
    ]
    kept = [source.column_R("id_hash").tobytes() for source in sources]
    return digest_of(choices | {"sources": read}, kept)
