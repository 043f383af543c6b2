"""Makes the shipped models: `python -m megatron_credit.tasks.warm_start --out DIRECTORY`.

A Qwen3 of 0.64 million parameters learns to imitate a pupil who forgets carries. The pupil is right
about half of the time, so no amount of imitation goes beyond that; a verifier's reward can.
Train it to the end: from half-learned facts reinforcement learning gets nowhere.
"""

import argparse
import logging
import time
from pathlib import Path
from random import Random

import torch

from megatron_credit.tasks.accuracy import measure_accuracy
from megatron_credit.tasks.chain_sum import ChainSum, ChainSumConfig
from megatron_credit.tasks.credit_model import make_credit_model
from megatron_credit.tasks.imitation import BATCH_ROWS, build_model, train, write_model
from megatron_credit.tasks.model_card import write_model_card
from megatron_credit.tasks.tokenizer import build_tokenizer
from megatron_credit.tasks.warm_start_rows import (
    RowConfig,
    WarmStartRows,
    make_turns,
    questions_of,
)

logger = logging.getLogger(__name__)

# The questions to imitate on: away from those of reinforcement learning and the held-out ones.
QUESTION_SEED = 30_000_000
TOKENIZER_QUESTIONS = 2000


def make_model(directory: Path, *, steps: int, seed: int) -> None:
    """Trains the model, writes it and its README with what it reaches on the held-out questions."""
    started = time.process_time()
    # The held-out questions are those of the default task; only the training questions differ.
    task = ChainSum(ChainSumConfig(seed=QUESTION_SEED))
    tokenizer = build_tokenizer(
        task.train_prompt(index).messages[0]["content"] for index in range(TOKENIZER_QUESTIONS)
    )
    torch.manual_seed(seed)
    model = build_model()
    rows = WarmStartRows(
        questions_of(task),
        tokenizer,
        lambda question, rng: make_turns(question, RowConfig(), rng),
        Random(seed),
    )
    train(model, rows.batches(BATCH_ROWS), steps)
    minutes = (time.process_time() - started) / 60
    write_model(directory, model, tokenizer)
    prompts = task.eval_prompts()
    sampled = measure_accuracy(model, tokenizer, task, prompts, temperature=1.0)
    greedy = measure_accuracy(model, tokenizer, task, prompts, temperature=0.0)
    logger.info("%d held-out questions: temperature 1 %s, greedy %s", len(prompts), sampled, greedy)
    write_model_card(
        directory,
        num_parameters=model.num_parameters(),
        steps=steps,
        seed=seed,
        minutes=minutes,
        sampled=sampled,
        greedy=greedy,
        num_prompts=len(prompts),
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Makes a shipped model.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument(
        "--preset",
        choices=["quickstart", "credit"],
        default="quickstart",
        help="which model: models/chain-sum-0.6m or models/chain-sum-credit",
    )
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps of 64 rows")
    parser.add_argument("--seed", type=int, default=1, help="of the weights and the pupil")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    make = make_credit_model if arguments.preset == "credit" else make_model
    make(arguments.out, steps=arguments.steps, seed=arguments.seed)


if __name__ == "__main__":
    main()
