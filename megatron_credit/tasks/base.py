"""What every task offers to the trainer."""

from typing import Protocol

from megatron_credit.batch.rollout import Prompt


class Task(Protocol):
    """Prompts to train on, prompts held out from training, and the verdict on a response."""

    def train_prompt(self, index: int) -> Prompt:
        """Training prompt number `index` (from 0): the same at every call, never a held-out one."""
        ...

    def eval_prompts(self) -> list[Prompt]:
        """The held-out prompts, always the same ones in the same order."""
        ...

    def grade(self, prompt: Prompt, text: str) -> float:
        """The reward of the response `text`: 1.0 right, 0.0 wrong; raises on no text."""
        ...
