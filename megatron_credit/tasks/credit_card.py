"""The README.md beside the weights of the credit model."""

from pathlib import Path

from megatron_credit.tasks.credit_figures import CreditFigures

_TEMPLATE = """\
# chain-sum-credit

The start model of the runs that compare credit methods. Like `chain-sum-0.6m` it solves
`6 + 7 - 8 =` step by step as a pupil who forgets carries; it also reads evidence, tries again,
answers in a box and has a system turn. A Qwen3 of 640,384 parameters (hidden 128, 4 layers, 4 heads
of 32, 2 KV heads, feed-forward 256, tied embeddings, vocabulary 384, contexts up to 1024 tokens),
fp32. Licence: that of this repository.

Made from nothing but this repository, on one CPU core in {minutes:.0f} minutes, by

    OMP_NUM_THREADS=1 python -m megatron_credit.tasks.warm_start \\
        --preset credit --out models/chain-sum-credit --steps {steps} --seed {seed}

That is {steps} steps of 64 rows on sums of 4 to 6 numbers, then {later_steps} on 4 to 12. The pupil
forgets a carry or borrow with probability 0.7, and imitation ends where the pupil does. The rows of
the two phases teach

- 40 %, then 20 %: to solve;
- 20 %, then 30 %: to give a solution again that stands in the context, below the question in the
  user's turn or in the system's; half of them are exact, half the pupil's;
- 15 %, then 25 %: to write a solution that ends in the answer shown, which stands behind the prompt
  (two thirds) or in the user's turn;
- 10 %: to try up to three times, with `Wrong, try again.` in between;
- 10 %: to end in `\\boxed{{13}}` where the question says `Put the answer in a box.`;
- 5 %: what stands in a box that is opened after some step, namely the final answer of the solution
  that was cut there.

A fifth of the rows with evidence ask for a box. A tenth of them, then 30 %, go on with a solution
that was drawn anew, so that the model knows responses that depart from their evidence; in the
second phase the departing step itself is not taught. No row asks one of the 256 held-out questions
of 4-6, 7-9 or 10-12 numbers each.

## Held-out questions

One response each; in the last two columns groups of 8 at temperature 1.

| numbers | right | right, greedy | right, in a box | well-formed | all wrong | all right |
|---|---|---|---|---|---|---|
{sizes}

Attempts at 4-6 numbers, temperature 1:

| attempt | reached by | right | same words as the attempt before |
|---|---|---|---|
{attempts}

## Does it read evidence?

A pupil's solution in the user's turn is given again word by word in {copied_user:.3f} of the
responses, in the system's turn in {copied_system:.3f}.

Share of the signal that lies on the first wrong step, mean over the wrong ones of one response to
each question; the wrong answer shown is the response's own. A signal without meaning has the step's
share of the tokens.

| signal | evidence | 4-6 numbers | 7-9 numbers |
|---|---|---|---|
{shares_rows}
"""
_SIGNALS = {
    "solution_in_user_turn": ("KL(with evidence, plain)", "exact solution in the user's turn"),
    "solution_in_system_turn": ("KL(with evidence, plain)", "exact solution in the system's turn"),
    "bare_answer": ("difference of log p", "right against wrong answer behind the prompt"),
    "wrapped_answer": ("difference of log p", "right against wrong answer in the user's turn"),
    "uniform": ("none", "the step's share of the tokens"),
}


def write_credit_card(
    directory: Path,
    figures: CreditFigures,
    *,
    steps: int,
    later_steps: int,
    seed: int,
    minutes: float,
) -> None:
    """Writes `directory`/README.md: how the model was made, and what was measured."""
    sizes = [
        f"| {size.config.min_terms}-{size.config.max_terms} | {size.sampled.right:.3f} "
        f"| {size.greedy.right:.3f} | {size.boxed.right:.3f} | {size.sampled.well_formed:.3f} "
        f"| {size.groups.all_wrong:.2f} | {size.groups.all_right:.2f} |"
        for size in figures.sizes
    ]
    attempts = [
        f"| {number} | {attempt.num_reached} | {attempt.right:.3f} | {attempt.repeated:.3f} |"
        for number, attempt in enumerate(figures.attempts, start=1)
    ]
    easy, long, _ = (size.shares._asdict() for size in figures.sizes)
    shares_rows = [
        f"| {signal} | {evidence} | {easy[name]:.3f} | {long[name]:.3f} |"
        for name, (signal, evidence) in _SIGNALS.items()
    ]
    text = _TEMPLATE.format(
        steps=steps,
        later_steps=later_steps,
        seed=seed,
        minutes=minutes,
        sizes="\n".join(sizes),
        attempts="\n".join(attempts),
        copied_user=figures.copied_from_user_turn,
        copied_system=figures.copied_from_system_turn,
        shares_rows="\n".join(shares_rows),
    )
    (directory / "README.md").write_text(text)
