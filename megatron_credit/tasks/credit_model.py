"""The model of the credit methods' runs: `warm_start --preset credit` makes it."""

import logging
import time
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch

from megatron_credit.tasks.chain_sum import ChainSum, ChainSumConfig
from megatron_credit.tasks.credit_card import write_credit_card
from megatron_credit.tasks.credit_figures import EASY, HARD, LONG, measure_credit_figures
from megatron_credit.tasks.credit_rows import CreditRowConfig, make_credit_turns
from megatron_credit.tasks.imitation import BATCH_ROWS, build_model, train, write_model
from megatron_credit.tasks.tokenizer import CREDIT_MAX_LENGTH, build_credit_tokenizer
from megatron_credit.tasks.warm_start_rows import WarmStartRows, questions_of

logger = logging.getLogger(__name__)


class Phase(NamedTuple):
    """A part of the training, with a learning rate that ends near zero."""

    max_terms: int
    """Most numbers of a sum; the fewest are 4."""
    seed: int
    """Where its questions are drawn: away from those of reinforcement learning and held-out ones.
    """
    share: float
    """Optimizer steps, in steps of the first phase."""
    lr_scale: float
    rows: CreditRowConfig

    def steps(self, first: int) -> int:
        """Optimizer steps where the first phase has `first`."""
        return round(self.share * first)


# Long sums first would take much longer: the facts are the same, and rows are twice as long.
# To read evidence in them takes more lessons, hence the other mixture.
PHASES = (
    Phase(6, 30_000_000, 1.0, 1.0, CreditRowConfig()),
    Phase(
        12,
        40_000_000,
        0.7,
        0.7,
        CreditRowConfig(
            solution_share=0.3, answer_share=0.25, stray_share=0.3, teach_departure=False
        ),
    ),
)


def held_out_questions() -> frozenset[str]:
    """The held-out questions of all sizes that the model is meant for."""
    return frozenset(
        prompt.messages[0]["content"]
        for config in (EASY, LONG, HARD)
        for prompt in ChainSum(config).eval_prompts()
    )


def credit_rows(phase: Phase, rng: Random) -> WarmStartRows:
    """The training rows of a phase."""
    task = ChainSum(ChainSumConfig(max_terms=phase.max_terms, seed=phase.seed))
    return WarmStartRows(
        questions_of(task, held_out=held_out_questions()),
        build_credit_tokenizer(),
        lambda question, rng: make_credit_turns(question, phase.rows, rng),
        rng,
    )


def make_credit_model(directory: Path, *, steps: int, seed: int) -> None:
    """Trains the model, `steps` in the first phase, and writes it with its figures."""
    started = time.process_time()
    torch.manual_seed(seed)
    model = build_model(max_length=CREDIT_MAX_LENGTH)
    for number, phase in enumerate(PHASES):
        batches = credit_rows(phase, Random(seed + number)).batches(BATCH_ROWS)
        train(model, batches, phase.steps(steps), lr_scale=phase.lr_scale)
    minutes = (time.process_time() - started) / 60
    tokenizer = build_credit_tokenizer()
    write_model(directory, model, tokenizer)
    figures = measure_credit_figures(model, tokenizer)
    logger.info("%s", figures)
    later_steps = PHASES[1].steps(steps)
    write_credit_card(
        directory, figures, steps=steps, later_steps=later_steps, seed=seed, minutes=minutes
    )
