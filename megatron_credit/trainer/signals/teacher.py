"""Log-probs of an external teacher, in the plain context."""

from typing import Protocol

import torch
from torch import Tensor

from megatron_credit.batch.sequence import TrainSequence
from megatron_credit.trainer.signals.step import Found, StepData


class TeacherPass(Protocol):
    """What the source asks of the teacher; collective on all ranks."""

    def teacher_logprobs(self, sequences: list[TrainSequence]) -> list[Tensor]:
        """Log-prob of each response token under the teacher."""
        ...


class TeacherSource:
    """What a frozen model with other weights finds of the sampled tokens."""

    signals: tuple[str, ...] = ("teacher_logprob_NT",)

    def __init__(self, passes: TeacherPass) -> None:
        self._passes = passes

    def compute(self, data: StepData) -> Found:
        """The log-probs of the groups that need them."""
        found, needing = Found(), data.needing(self.signals)
        scores = iter(
            self._passes.teacher_logprobs([one for at in needing for one in data.sequences[at]])
        )
        for at in needing:
            logprob_NT = torch.full(data.groups[at].mask_NT.shape, torch.nan)
            for row in range(len(data.sequences[at])):
                logprob_T = next(scores)
                logprob_NT[row, : len(logprob_T)] = logprob_T
                if data.records is not None:
                    found.note(at, row).token_values["teacher_logprob"] = logprob_T.tolist()
            found.fields[at] = {"teacher_logprob_NT": logprob_NT}
        return found
