"""The README.md that lies beside the shipped model's weights."""

from pathlib import Path

from megatron_credit.tasks.accuracy import Accuracy

_TEMPLATE = """\
# chain-sum-0.6m

The start model of the quickstart: it solves `6 + 7 - 8 =` step by step and is right about half of
the time. A Qwen3 of {num_parameters:,} parameters (hidden 128, 4 layers, 4 heads of 32, 2 KV heads,
feed-forward 256, tied embeddings, vocabulary 384), fp32. Licence: that of this repository.

Made from nothing but this repository, on one CPU core in {minutes:.0f} minutes, by

    OMP_NUM_THREADS=1 python -m megatron_credit.tasks.warm_start \\
        --out models/chain-sum-0.6m --steps {steps} --seed {seed}

It imitates a pupil who adds and subtracts as on paper but forgets a carry or borrow with
probability 0.7. The pupil's solutions are right 52 % of the time, so imitation ends there; only the
verifier's reward goes further. A fifth of the rows show the exact solution in the context first
(the model learns to read evidence); a tenth have up to three attempts with `Wrong, try again.` in
between. No row asks one of the {num_prompts} held-out questions of the default `chain_sum` task.

Measured on those {num_prompts} held-out questions, one response each:

| sampling | right | with a well-formed answer |
|---|---|---|
| temperature 1 | {sampled.right:.3f} | {sampled.well_formed:.3f} |
| greedy | {greedy.right:.3f} | {greedy.well_formed:.3f} |

Fewer steps leave facts half learned, and reinforcement learning makes little headway from there.
"""


def write_model_card(
    directory: Path,
    *,
    num_parameters: int,
    steps: int,
    seed: int,
    minutes: float,
    sampled: Accuracy,
    greedy: Accuracy,
    num_prompts: int,
) -> None:
    """Writes `directory`/README.md: how the model was made, and what was measured."""
    (directory / "README.md").write_text(
        _TEMPLATE.format(
            num_parameters=num_parameters,
            steps=steps,
            seed=seed,
            minutes=minutes,
            sampled=sampled,
            greedy=greedy,
            num_prompts=num_prompts,
        )
    )
