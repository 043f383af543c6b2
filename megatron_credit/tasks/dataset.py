"""The user's own prompts and answers, from files."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from megatron_credit.batch.rollout import Prompt
from megatron_credit.data.config import DataConfig, SourceConfig
from megatron_credit.data.load import load_data
from megatron_credit.rewards.pool import Question, VerifierPool
from megatron_credit.rewards.verdict import Verdict

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class DatasetTask:
    """Prompts of JSONL, JSON, Parquet and Arrow files, each graded by its source's verifier."""

    def __init__(
        self, config: DataConfig, *, tokenizer: "PreTrainedTokenizerBase", seed: int
    ) -> None:
        """Reads all rows; raises ValueError where files, rows or a verifier cannot be used."""
        sources = (*config.train, *config.eval)
        verifiers = {source.name: config.verifier_of(source) for source in sources}
        self._only_source = sources[0].name
        self._pool = VerifierPool(verifiers, config.verifier_pool)
        with ExitStack() as unless_loaded:
            unless_loaded.callback(self._pool.close)
            self._data = load_data(
                config,
                tokenizer=tokenizer,
                check_references=self._check_references,
                seed=seed,
            )
            unless_loaded.pop_all()

    def train_prompt(self, index: int) -> Prompt:
        """Training prompt number `index`."""
        return self._data.train_prompt(index)

    def eval_prompts(self) -> list[Prompt]:
        """The held-out prompts; there may be none."""
        return self._data.eval_prompts()

    def grade(self, answers: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """The verdict on each response, in order."""
        return self._pool.grade(
            [
                Question(prompt.source or self._only_source, text, prompt.answer, prompt.metadata)
                for prompt, text in answers
            ]
        )

    def longest_prompts(self) -> list[Prompt]:
        """The longest prompt of each source."""
        return self._data.longest_prompts()

    def report(self) -> dict[str, Any]:
        """Rows read, kept and left out, by source; `summary` is the same in words."""
        report = self._data.report
        return {"summary": str(report).splitlines(), "sources": report.as_json()}

    def fingerprint(self) -> str:
        """A digest of the files and of what decides which prompt comes when."""
        return self._data.fingerprint

    def close(self) -> None:
        """Ends the processes of the verifiers."""
        self._pool.close()

    def _check_references(
        self, source: SourceConfig, answers: Sequence[tuple[str, dict[str, Any]]]
    ) -> list[str | None]:
        return self._pool.check_references(
            [Question(source.name, "", answer, metadata) for answer, metadata in answers]
        )
