"""What the quickstart's model is taught: the forgetful pupil's solutions, in three kinds of chat.

Shape letters: B rows of a batch, L tokens of the longest row.
"""

import itertools
from collections.abc import Callable, Container, Iterator
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from megatron_credit.batch.evidence_text import RETRY
from megatron_credit.rewards.answer_tags import last_answer
from megatron_credit.settings import Settings
from megatron_credit.tasks.base import Task
from megatron_credit.tasks.solver import exact_solution, forgetful_solution
from megatron_credit.tasks.tokenizer import ASSISTANT, END, PAD_ID, USER

NOT_TRAINED = -100
"""Label of a token that carries no loss (torch's ignore_index)."""


class RowConfig(Settings):
    """The mixture of rows."""

    forget: float = 0.7
    """Probability that a carry or borrow is forgotten."""
    evidence_share: float = 0.2
    """Share of rows where the exact solution stands in the context and is to be given again. They
    teach the model to read evidence, which the evidence-conditioned credit methods rely on."""
    retry_share: float = 0.1
    """Share of rows with several attempts, each wrong one answered by the retry sentence."""
    max_attempts: int = 3
    """Most attempts of a retry row."""


class Turn(NamedTuple):
    """A piece of a chat, and whether the model is trained to write it."""

    text: str
    trained: bool


class Row(NamedTuple):
    """Token ids of a chat and their labels (`NOT_TRAINED` where there is no loss)."""

    token_ids: list[int]
    labels: list[int]


def ask(question: str) -> str:
    """The user's turn and the opening of the assistant's, as the chat template writes them."""
    return f"{USER}{question}{ASSISTANT}"


def make_turns(question: str, config: RowConfig, rng: Random) -> list[Turn]:
    """One random chat about `question`."""
    kind = rng.random()
    if kind < config.evidence_share:
        answer = exact_solution(question) + END
        return [Turn(ask(question) + answer + ask(question), False), Turn(answer, True)]
    retries = kind < config.evidence_share + config.retry_share
    max_attempts = config.max_attempts if retries else 1
    return attempt_turns(question, max_attempts=max_attempts, forget=config.forget, rng=rng)


def attempt_turns(question: str, *, max_attempts: int, forget: float, rng: Random) -> list[Turn]:
    """Attempts until the verifier would be content: it reads the answer, not the steps, and two
    slips may cancel."""
    right = last_answer(exact_solution(question))
    turns = [Turn(ask(question), False)]
    for attempt in range(max_attempts):
        if attempt > 0:
            turns.append(Turn(ask(RETRY), False))
        solution = forgetful_solution(question, forget=forget, rng=rng)
        turns.append(Turn(solution + END, True))
        if last_answer(solution) == right:
            break
    return turns


def encode(turns: list[Turn], tokenizer: PreTrainedTokenizerBase) -> Row:
    """The turns one after the other; special tokens at their borders keep them independent."""
    token_ids: list[int] = []
    labels: list[int] = []
    for turn in turns:
        ids = tokenizer(turn.text, add_special_tokens=False)["input_ids"]
        token_ids += ids
        labels += ids if turn.trained else [NOT_TRAINED] * len(ids)
    return Row(token_ids, labels)


def questions_of(task: Task, *, held_out: Container[str] = ()) -> Iterator[str]:
    """The task's training questions one after the other, without those of `held_out`."""
    for index in itertools.count():
        question = task.train_prompt(index).messages[0]["content"]
        if question not in held_out:
            yield question


class WarmStartRows:
    """The endless sequence of training rows, one about each question.

    `write` makes the chat about a question; `rng` is its chance and that of the order of batches.
    """

    def __init__(
        self,
        questions: Iterator[str],
        tokenizer: PreTrainedTokenizerBase,
        write: Callable[[str, Random], list[Turn]],
        rng: Random,
    ) -> None:
        self._questions, self._tokenizer, self._write = questions, tokenizer, write
        self._rng = rng

    def next_row(self) -> Row:
        """The next row."""
        turns = self._write(next(self._questions), self._rng)
        return encode(turns, self._tokenizer)

    def batches(self, size: int, *, bucket: int = 16) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless batches (token_ids_BL, labels_BL), padded on the right.

        `bucket` batches are drawn at once and cut by length, so that little of them is padding.
        """
        while True:
            pool = sorted(
                (self.next_row() for _ in range(size * bucket)), key=lambda row: len(row.token_ids)
            )
            order = list(range(bucket))
            self._rng.shuffle(order)
            for place in order:
                yield collate(pool[place * size : (place + 1) * size])


def collate(rows: list[Row]) -> tuple[Tensor, Tensor]:
    """token_ids_BL padded with `PAD_ID`, labels_BL padded with `NOT_TRAINED`."""
    length = max(len(row.token_ids) for row in rows)
    token_ids_BL = torch.full((len(rows), length), PAD_ID)
    labels_BL = torch.full((len(rows), length), NOT_TRAINED)
    for place, row in enumerate(rows):
        token_ids_BL[place, : len(row.token_ids)] = torch.tensor(row.token_ids)
        labels_BL[place, : len(row.labels)] = torch.tensor(row.labels)
    return token_ids_BL, labels_BL
