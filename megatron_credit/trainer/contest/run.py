"""Runs a comparison of configurations and writes what came of it."""

import platform
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import torch
from rich.console import Console

from megatron_credit.trainer.contest.entries import Entry, read_entries
from megatron_credit.trainer.contest.figures import Record
from megatron_credit.trainer.contest.report import write_report
from megatron_credit.trainer.metrics import read_metrics
from megatron_credit.trainer.series import run_series

METRICS = ("eval/accuracy", "eval/accuracy_greedy")


def compare(
    paths: Sequence[Path],
    output: Path,
    console: Console,
    *,
    overrides: Sequence[str],
    seeds: Sequence[int],
    jobs: int,
) -> list[Path]:
    """Trains what is missing and writes the tables; the files that were written.

    `jobs`: series of runs at the same time; more than one makes step times meaningless. ValueError
    before anything is started for what the user can correct.
    """
    if not paths or not seeds or jobs < 1:
        raise ValueError(
            f"{len(paths)} configurations, {len(seeds)} seeds, {jobs} jobs; expected at least one "
            "of each"
        )
    entries = read_entries(paths, overrides, seeds=seeds, output=output)
    missing = [entry for entry in entries if not entry.is_done()]
    console.print(f"{len(entries)} runs, {len(entries) - len(missing)} of them done before")
    # Seed by seed, so that an interrupted comparison has whole seeds.
    missing.sort(key=lambda entry: seeds.index(entry.seed))
    with ThreadPoolExecutor(jobs) as threads:
        shares = [missing[number::jobs] for number in range(jobs) if missing[number::jobs]]
        series = [
            threads.submit(run_series, [entry.run for entry in share], console) for share in shares
        ]
        for one in series:
            one.result()
    records = [recorded(entry) for entry in entries]
    verification = sorted(
        {
            name
            for record in records
            for metrics in record.steps.values()
            for name in metrics
            if name.startswith("eval/verification_at_")
        }
    )
    return write_report(
        records, output, metrics=[*METRICS, *verification], about=about(seeds, jobs)
    )


def recorded(entry: Entry) -> Record:
    """The metrics of a run that is over."""
    records = read_metrics(entry.directory.metrics)
    return Record(entry.name, entry.seed, {int(one["step"]): one for one in records})


def about(seeds: Sequence[int], jobs: int) -> dict[str, str]:
    """What the figures depend on besides the configurations."""
    return {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} thread a process",
        "torch": torch.__version__,
        "seeds": ", ".join(map(str, seeds)),
        "series at once": str(jobs),
    }
