"""What the head of the page says of a run."""

from collections.abc import Iterator
from typing import Any

Fact = tuple[str, Any]
CONFIG_FACTS = (
    ("model", "policy.model"),
    ("task", "task.kind"),
    ("data", "data.train"),
    ("verifier", "data.verifier"),
    ("credit", "credit.method"),
    ("steps", "trainer.steps"),
    ("prompts a step", "trainer.prompts_per_step"),
    ("samples a prompt", "trainer.samples_per_prompt"),
    ("new tokens at most", "sampling.max_new_tokens"),
    ("learning rate", "optimizer.lr"),
    ("seed", "run.seed"),
)
LAST_VALUES = ("eval/accuracy", "eval/accuracy_greedy", "reward/mean")


def config_facts(config: dict[str, Any]) -> Iterator[Fact]:
    """Name and value of the settings that tell runs apart."""
    for label, key in CONFIG_FACTS:
        value: Any = config
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            yield label, value


def last_values(metrics: list[dict[str, float]]) -> Iterator[tuple[str, float, float]]:
    """Name, step and value of the newest record of each result."""
    for name in LAST_VALUES:
        having = [record for record in metrics if name in record]
        if having:
            yield name, having[-1]["step"], having[-1][name]


def step_ranges(steps: list[int]) -> str:
    """Ascending steps in words: 1-3, 7."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][-1] + 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
