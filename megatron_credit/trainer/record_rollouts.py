"""`megatron-credit rollout`: the rollouts of training steps, sampled by one set of weights."""

import re
from collections import Counter
from pathlib import Path

from rich.console import Console

from megatron_credit.batch.rollout import Rollout
from megatron_credit.batch.rollout_files import write_rollouts
from megatron_credit.rewards.verdict import OUTCOMES
from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.engine_run import (
    Questions,
    find_weights,
    locked_output,
    open_questions,
    open_sampler,
)
from megatron_credit.trainer.recorded_steps import ranges, step_files
from megatron_credit.trainer.resampling import step_groups
from megatron_credit.trainer.rollout_meta import (
    check_same_sampling,
    describe_sampling,
    write_meta,
)
from megatron_credit.trainer.sampler import Sampler

STEPS = re.compile(r"([1-9]\d{0,5})(?:-([1-9]\d{0,5}))?")


def record_rollouts(
    config: RunConfig,
    console: Console,
    *,
    steps: range,
    output: Path,
    weights: str | None,
    suffix: str,
) -> None:
    """Writes a file for each step that `output` does not have yet, and meta.json.

    Raises ValueError, before an engine is started, for what the user can correct, EngineError where
    it dies.
    """
    found = find_weights(config, weights)
    with locked_output(output), open_questions(config, found) as questions:
        meta = describe_sampling(
            questions.config,
            questions=questions.task.fingerprint(),
            weights=str(found.path.absolute()),
        )
        check_same_sampling(output, meta)
        kept = step_files(output)
        there = [step for step in steps if step in kept]
        if there:
            console.print(f"kept step {ranges(there)}, sampled before")
        if len(there) < len(steps):
            write_meta(output, meta)
            missing = [step for step in steps if step not in kept]
            sample_steps(questions, console, steps=missing, output=output, suffix=suffix)


def sample_steps(
    questions: Questions, console: Console, *, steps: list[int], output: Path, suffix: str
) -> None:
    """Samples these steps and says after each what became of it."""
    total = Counter[str]()
    with open_sampler(questions, log=output / "engine.log") as sampler:
        for step in steps:
            rollouts = rollouts_of_step(questions.config, sampler, step)
            path = output / f"step-{step:06d}{suffix}"
            write_rollouts(path, rollouts)
            found = Counter(rollout.outcome for rollout in rollouts)
            console.print(f"step {step} | {counts(found)} | {path}", markup=False)
            total += found
    if len(steps) > 1:
        console.print(f"{len(steps)} steps | {counts(total)}", markup=False)


def rollouts_of_step(config: RunConfig, sampler: Sampler, step: int) -> list[Rollout]:
    """The rollouts that a training run would sample for this step with these weights."""
    sizes = config.trainer
    found = step_groups(
        sampler,
        step,
        num_prompts=sizes.prompts_per_step,
        num_samples=sizes.samples_per_prompt,
        tries=sizes.resample_tries,
    )
    return [rollout for group in found.groups for rollout in group]


def counts(outcomes: Counter[str]) -> str:
    """How often each outcome occurred."""
    return " ".join([
        f"rollouts {outcomes.total()}",
        *(f"{outcome} {outcomes[outcome]}" for outcome in OUTCOMES),
    ])


def parse_steps(text: str | None, *, last: int) -> range:
    """`3` or `3-7` as the steps they name; all from 1 to `last` without a text."""
    if text is None:
        text = f"1-{max(last, 1)}"
    match = STEPS.fullmatch(text)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise ValueError(
            f"--steps {text!r} names no steps; give one, such as 3, or the first and the last, "
            "such as 3-7, counted from 1"
        )
    return range(int(match[1]), int(match[2] or match[1]) + 1)
