"""What reading rollouts behind evidence asks of the policy, and which context has which number."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron_credit.batch.sequence import TrainSequence
from megatron_credit.batch.views import Views, ViewScores
from megatron_credit.credit.need import EvidenceNeed
from megatron_credit.trainer.signals.config import EvidenceSection


class TeacherPasses(Protocol):
    """What the source asks of the policy; collective on all ranks."""

    @property
    def reads_itself(self) -> bool:
        """The teacher is the policy as it is now."""
        ...

    def teacher_logprobs(self, sequences: list[TrainSequence]) -> list[Tensor]:
        """Log-prob of each response token under the teacher."""
        ...

    def score_views(
        self,
        views: list[Views],
        *,
        contrast: tuple | None,
        section: EvidenceSection,
        keep: bool,
    ) -> list[ViewScores]:
        """Statistics of the contexts; `keep`: the coming update reads the same views."""
        ...


@dataclass(frozen=True)
class Slots:
    """Which context has which number: 0 is the plain one."""

    free: int
    positive: int
    negatives: tuple[int, ...]

    @classmethod
    def of(cls, need: EvidenceNeed, *, num_negatives: int, reads_itself: bool) -> "Slots":
        """The free context is the plain one where the policy itself reads it."""
        free = 1 if need.free and not reads_itself else 0
        return cls(free, free + 1, tuple(range(free + 2, free + 2 + num_negatives)))

    def contrast(self, kind: str) -> tuple[str, int, tuple[int, ...] | None, int]:
        """The contrast of this kind, as the kernels take it."""
        return kind, self.positive, None if kind == "fixed" else self.negatives, self.free
