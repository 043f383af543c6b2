"""What the benchmark hands to its worker, as a file."""

from pathlib import Path

from megatron_credit.mcore.config import TeacherConfig
from megatron_credit.settings import Settings
from megatron_credit.trainer.config import RunConfig


class Pass(Settings):
    """One method over one record."""

    name: str
    """What its file is called."""
    record: str
    """Name of the record."""
    config: RunConfig
    """Of a run with this method."""


class CreditPlan(Settings):
    """What the worker does: all passes with the same policy, a file of credited rollouts each."""

    directory: Path
    """Where the worker writes."""
    checkpoint: Path | None = None
    """The policy's weights, where they are not those of policy.model."""
    average: TeacherConfig | None = None
    """The moving average that the checkpoint holds."""
    records: dict[str, Path]
    passes: tuple[Pass, ...]

    @property
    def logs(self) -> Path:
        """Where the ranks say what they do."""
        return self.directory / "logs"

    def credited(self, name: str) -> Path:
        """The rollouts of a record with the credit that a pass gave them."""
        return self.directory / "credit" / f"{name}.jsonl"
