"""What every task offers to the trainer."""

from collections.abc import Sequence
from typing import Any, Protocol

from megatron_credit.batch.rollout import Prompt
from megatron_credit.rewards.verdict import Verdict


class Task(Protocol):
    """Prompts to train on, prompts held out from training, and the verdicts on responses."""

    def train_prompt(self, index: int) -> Prompt:
        """Training prompt number `index` (from 0): the same at every call, never a held-out one."""
        ...

    def eval_prompts(self) -> list[Prompt]:
        """The held-out prompts, always the same ones in the same order."""
        ...

    def grade(self, answers: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """The verdict on each (prompt, text of a response), in order; raises on no text."""
        ...

    def longest_prompts(self) -> list[Prompt]:
        """Prompts with which the context is sized: the longest there are, or a large sample."""
        ...

    def report(self) -> dict[str, Any]:
        """What was read and what was left out; only what JSON can hold. `summary` has it in lines
        for people."""
        ...

    def fingerprint(self) -> str:
        """A digest of the questions: a run that goes on must find the same one."""
        ...

    def close(self) -> None:
        """Ends the processes that the task started."""
        ...
