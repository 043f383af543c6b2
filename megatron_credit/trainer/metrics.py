"""The metrics of a run: one JSON object a step, copied to the loggers."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from megatron_credit.batch.rollout_files import number, without_nan
from megatron_credit.errors import writing
from megatron_credit.trainer.loggers import Logger


class MetricsLog:
    """Appends one record a step to a JSONL file and gives it to the loggers.

    A record is on disk when `write` returns, so a checkpoint never knows more than the metrics do.
    """

    def __init__(self, path: Path, loggers: Sequence[Logger], *, last_step: int) -> None:
        """Goes on after the record of `last_step`."""
        keep_metrics(path, last_step=last_step)
        self._path = path
        self._lines = path.open("a")
        self._loggers = loggers

    def write(self, step: int, values: dict[str, float]) -> None:
        """Records the values of one step."""
        with writing(self._path):
            self._lines.write(line({"step": step, **values}))
            self._lines.flush()
            os.fsync(self._lines.fileno())
        for logger in self._loggers:
            logger.write(step, values)

    def close(self) -> None:
        """Flushes everything."""
        self._lines.close()
        for logger in self._loggers:
            logger.close()


def line(record: dict[str, float]) -> str:
    """A record as a line of JSON, null for NaN."""
    return json.dumps(without_nan(record), allow_nan=False) + "\n"


def keep_metrics(path: Path, *, last_step: int) -> None:
    """Drops the records after `last_step`, which a resumed run repeats, and a record cut in two."""
    kept = [record for record in read_metrics(path) if record["step"] <= last_step]
    partial = path.with_suffix(".tmp")
    with writing(partial):
        partial.write_text("".join(map(line, kept)))
    partial.replace(path)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The whole records of a metrics file, in order; a line cut off by a kill is left out."""
    if not path.is_file():
        return []
    records = []
    for text in path.read_text().splitlines(keepends=True):
        if text.endswith("\n"):
            record = json.loads(text)
            records.append({name: number(value) for name, value in record.items()})
    return records
