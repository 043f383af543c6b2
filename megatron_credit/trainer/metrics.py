"""The metrics of a run: one JSON object a step, mirrored to TensorBoard."""

import json
import os
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter


class MetricsLog:
    """Appends one record a step to a JSONL file and to TensorBoard.

    A record is on disk when `write` returns, so a checkpoint never knows more than the metrics do.
    """

    def __init__(self, path: Path, tensorboard: Path, *, last_step: int) -> None:
        """Goes on after the record of `last_step`."""
        keep_metrics(path, last_step=last_step)
        self._lines = path.open("a")
        self._board = SummaryWriter(str(tensorboard), purge_step=last_step + 1)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Records the values of one step."""
        self._lines.write(json.dumps({"step": step, **values}) + "\n")
        self._lines.flush()
        os.fsync(self._lines.fileno())
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Flushes both files."""
        self._lines.close()
        self._board.close()


def keep_metrics(path: Path, *, last_step: int) -> None:
    """Drops the records after `last_step`, which a resumed run repeats, and a record cut in two."""
    kept = [record for record in read_metrics(path) if record["step"] <= last_step]
    partial = path.with_suffix(".tmp")
    partial.write_text("".join(json.dumps(record) + "\n" for record in kept))
    partial.replace(path)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The whole records of a metrics file, in order; a line cut off by a kill is left out."""
    if not path.is_file():
        return []
    records = []
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            records.append(json.loads(line))
    return records
