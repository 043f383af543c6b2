"""The runs of a comparison: each configuration with each seed."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_credit.trainer.checks import CheckedRun, check_run
from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.load_config import load_config
from megatron_credit.trainer.run_directory import RunDirectory
from megatron_credit.trainer.series import is_complete

ALIKE = ("task", "data", "sampling", "attempts", "optimizer", "trainer", "evaluation", "policy")
"""Sections that decide what a step costs and what it is measured on."""


@dataclass(frozen=True)
class Entry:
    """One run of the comparison."""

    name: str
    seed: int
    run: CheckedRun

    @property
    def directory(self) -> RunDirectory:
        """Where it is kept."""
        return RunDirectory(self.run.config.run.directory)

    def is_done(self) -> bool:
        """It ran to its end with this very configuration before."""
        config, directory = self.run.config, self.directory
        if not directory.config.is_file() or not is_complete(config, directory):
            return False
        was = RunConfig.model_validate_json(directory.config.read_text())
        return comparable(was) == comparable(config)


def comparable(config: RunConfig) -> dict:
    """What decides the curve: everything but the engine's context, which is shared."""
    tree = json.loads(config.model_dump_json())
    tree["engine"].pop("max_model_len")
    tree["run"].pop("directory")
    return tree


def read_entries(
    paths: Sequence[Path], overrides: Sequence[str], *, seeds: Sequence[int], output: Path
) -> list[Entry]:
    """Every configuration with every seed, the first configuration being the baseline.

    ValueError where a configuration is wrong, two have one name, or they cannot be compared.
    """
    names = [path.stem for path in paths]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"two configurations are called {repeated[0]}; rename one of the files")
    entries, first = list[Entry](), None
    for name, path in zip(names, paths, strict=True):
        config = load_config(path, list(overrides))
        first = first or config
        check_alike(first, config, names[0], name)
        # The questions do not depend on the seed: they are checked once.
        checked = check_run(config)
        for seed in seeds:
            directory = output / name / f"seed-{seed}"
            run = config.run.model_copy(
                update={"directory": directory, "seed": seed, "resume": "never"}
            )
            seeded = checked.config.model_copy(update={"run": run})
            entries.append(Entry(name, seed, CheckedRun(seeded, checked.questions)))
    return entries


def check_alike(first: RunConfig, config: RunConfig, first_name: str, name: str) -> None:
    """ValueError where an equal number of steps would not be an equal effort."""
    differing = [part for part in ALIKE if vars(first)[part] != vars(config)[part]]
    if differing:
        raise ValueError(
            f"{name} and {first_name} differ in [{differing[0]}], so their steps cannot be "
            "compared; give both the same, or compare them apart"
        )
