"""`megatron-credit eval`: how well a model answers the held-out prompts."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_credit.batch.rollout import Prompt, Rollout
from megatron_credit.batch.rollout_files import without_nan, write_rollouts
from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.engine_run import (
    Questions,
    find_weights,
    locked_output,
    open_questions,
    open_sampler,
)
from megatron_credit.trainer.evaluation import Estimate, summarise
from megatron_credit.trainer.sampler import Sampler

DEFAULT_SAMPLES = 8
DEFAULT_KS = (1, 2, 4, 8)
BATCHES_AHEAD = 4
"""Answers that are asked for together, as a multiple of what the engine decodes together."""


@dataclass(frozen=True)
class Plan:
    """How many answers each prompt gets, and what is made of them."""

    num_samples: int
    ks: tuple[int, ...]
    temperature: float


@dataclass(frozen=True)
class Result:
    """Estimates by name; see `evaluation.summarise`."""

    total: dict[str, Estimate]
    datasets: dict[str, dict[str, Estimate]]


def make_plan(
    config: RunConfig, *, samples: int | None, ks: str | None, temperature: float | None
) -> Plan:
    """The plan with defaults filled in; ValueError where the numbers do not go together."""
    if temperature is None:
        temperature = config.sampling.temperature
    if not 0 <= temperature < math.inf:
        raise ValueError(f"--temperature {temperature} is none; give a number from 0 (greedy) on")
    if samples is None:
        samples = DEFAULT_SAMPLES if temperature > 0 else 1
    if not 1 <= samples <= config.engine.max_num_seqs:
        raise ValueError(
            f"--samples {samples}: expected 1 to engine.max_num_seqs={config.engine.max_num_seqs}, "
            "which can be raised by --set engine.max_num_seqs=.."
        )
    if temperature == 0 and samples > 1:
        raise ValueError(
            f"--temperature 0 gives the same answer {samples} times; use --samples 1, or a "
            "temperature above 0"
        )
    return Plan(samples, parse_ks(ks, samples), temperature)


def parse_ks(text: str | None, num_samples: int) -> tuple[int, ...]:
    """`1,2,4` as ascending numbers; without a text, those of the usual ones that are possible."""
    if text is None:
        return tuple(k for k in DEFAULT_KS if k <= num_samples)
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"--k {text!r} is no list of numbers from 1 on; expected such as 1,2,4")
    ks = sorted({int(part) for part in parts})
    if ks[-1] > num_samples:
        raise ValueError(
            f"--k {ks[-1]} is above --samples {num_samples}: the best of {ks[-1]} answers cannot "
            f"be known from fewer; give --samples {ks[-1]}, or leave out {ks[-1]}"
        )
    return tuple(ks)


def evaluate(
    config: RunConfig, console: Console, *, plan: Plan, weights: str | None, output: Path | None
) -> Path:
    """Samples and grades answers, shows the table, and writes the JSON file, whose path it gives.

    The graded answers stand beside it as a `.jsonl` record. Raises ValueError, before an engine is
    started, for what the user can correct, EngineError where it dies.
    """
    found = find_weights(config, weights)
    if output is None:
        output = config.run.directory.absolute() / "eval" / f"{found.path.name}.json"
    if output.suffix != ".json":
        raise ValueError(f"--output {output}: expected the name of a .json file")
    with locked_output(output.parent), open_questions(config, found) as questions:
        prompts = held_out(questions)
        groups = sample(questions, prompts, plan, console, log=output.with_suffix(".engine.log"))
        result = result_of(groups, plan.ks, max_attempts=config.max_attempts)
        content = describe(questions, plan, groups) | asdict(result)
    rollouts = output.with_suffix(".jsonl")
    write_rollouts(rollouts, (rollout for group in groups for rollout in group))
    partial = output.with_suffix(".tmp")
    partial.write_text(json.dumps(without_nan(content), indent=2, allow_nan=False) + "\n")
    partial.replace(output)
    console.print(table_of(result))
    console.print(without_verdict(groups))
    return output


def held_out(questions: Questions) -> list[Prompt]:
    """The prompts to answer; ValueError where there are none."""
    prompts = questions.task.eval_prompts()
    if not prompts:
        raise ValueError(
            "there are no held-out prompts to evaluate on; name files of their own by data.eval, "
            "or set data.eval_size to hold some of data.train out"
        )
    return prompts


def sample(
    questions: Questions, prompts: Sequence[Prompt], plan: Plan, console: Console, *, log: Path
) -> list[list[Rollout]]:
    """The graded answers to each prompt."""
    groups: list[list[Rollout]] = []
    at_once = max(1, BATCHES_AHEAD * questions.config.engine.max_num_seqs // plan.num_samples)
    with open_sampler(questions, log=log) as sampler:
        for part in answered(sampler, prompts, plan, at_once=at_once):
            groups += part
            console.print(f"answered {len(groups)} of {len(prompts)} prompts")
    return groups


def answered(
    sampler: Sampler, prompts: Sequence[Prompt], plan: Plan, *, at_once: int
) -> Iterator[list[list[Rollout]]]:
    """The answers to `at_once` prompts after the other.

    The seeds are those of a training run's evaluation: its answer to a prompt is the first here.
    """
    for start in range(0, len(prompts), at_once):
        yield sampler.groups(
            prompts[start : start + at_once],
            num_samples=plan.num_samples,
            temperature=plan.temperature,
            purpose="eval",
        )


def result_of(
    groups: Sequence[Sequence[Rollout]], ks: Sequence[int], *, max_attempts: int = 1
) -> Result:
    """The estimates of all prompts, and of each dataset's."""
    datasets: dict[str, list[Sequence[Rollout]]] = {}
    for group in groups:
        datasets.setdefault(group[0].source, []).append(group)
    parts = {
        name: summarise(part, ks, max_attempts=max_attempts) for name, part in datasets.items()
    }
    return Result(summarise(groups, ks, max_attempts=max_attempts), parts)


def describe(
    questions: Questions, plan: Plan, groups: Sequence[Sequence[Rollout]]
) -> dict[str, Any]:
    """What the JSON file says besides the estimates."""
    return {
        "weights": str(questions.weights.path.absolute()),
        "temperature": plan.temperature,
        "samples": plan.num_samples,
        "max_new_tokens": questions.config.sampling.max_new_tokens,
        "seed": questions.config.run.seed,
        "questions": questions.task.fingerprint(),
        "prompts": [
            {
                "id": group[0].prompt_id,
                "source": group[0].source,
                "samples": len(group),
                "verdicts": sum(not math.isnan(rollout.reward) for rollout in group),
                "right": sum(rollout.reward == 1 for rollout in group),
            }
            for group in groups
        ],
    }


def without_verdict(groups: Sequence[Sequence[Rollout]]) -> str:
    """How many answers the verifier did not come to a verdict on, and what became of them."""
    answers = [rollout for group in groups for rollout in group]
    number = sum(math.isnan(rollout.reward) for rollout in answers)
    remark = ": left out of all but the shares, not counted as wrong" if number else ""
    return f"{number} of {len(answers)} answers have no verdict{remark}"


def table_of(result: Result) -> Table:
    """The estimates as a table, with a column for each dataset where there are several."""
    columns = {"all prompts": result.total}
    if len(result.datasets) > 1:
        columns |= result.datasets
    table = Table(title="mean over prompts, with 95 % interval")
    table.add_column("")
    for name in columns:
        table.add_column(escape(name), justify="right")
    for name in result.total:
        digits = 1 if name == "length" else 3
        table.add_row(name, *(cell(found[name], digits) for found in columns.values()))
    table.add_row("prompts", *(str(found["length"].num_prompts) for found in columns.values()))
    return table


def cell(estimate: Estimate, digits: int) -> str:
    """An estimate with its interval, as far as there is one."""
    if math.isnan(estimate.mean):
        return "-"
    if math.isnan(estimate.low):
        return f"{estimate.mean:.{digits}f}"
    interval = f"[{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]"
    return f"{estimate.mean:.{digits}f} {escape(interval)}"
