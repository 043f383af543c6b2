"""What a person sees while a run goes on: a live table on a terminal, one line a step elsewhere."""

import time
from collections.abc import Callable

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_credit.trainer.metrics import read_metrics
from megatron_credit.trainer.run_directory import RunDirectory

RECENT_ROWS = 12
COLUMNS = (
    ("step", "step", "d"),
    ("reward", "reward/mean", ".3f"),
    ("accuracy", "eval/accuracy", ".3f"),
    ("greedy", "eval/accuracy_greedy", ".3f"),
    ("mismatch", "mismatch/logprob_abs_max", ".0e"),
    ("rollout s", "timing/rollout_s", ".2f"),
    ("train s", "timing/train_s", ".2f"),
    ("sync s", "timing/sync_s", ".2f"),
    ("tokens/s", "perf/tokens_per_s", ".0f"),
)


def follow(
    directory: RunDirectory, console: Console, poll: Callable[[], bool], *, every_s: float = 0.25
) -> None:
    """Shows the run's progress until `poll` answers False; `poll` may raise to end it."""
    shown = 0
    if not console.is_terminal:
        while poll():
            shown = print_new_lines(directory, console, shown)
            time.sleep(every_s)
        print_new_lines(directory, console, shown)
        return
    with Live(console=console, refresh_per_second=4) as live:
        while poll():
            live.update(dashboard(directory))
            time.sleep(every_s)
        live.update(dashboard(directory))


def print_new_lines(directory: RunDirectory, console: Console, shown: int) -> int:
    """Prints the records after the first `shown`; the number printed so far."""
    records = read_metrics(directory.metrics)
    for record in records[shown:]:
        console.print(one_line(record), highlight=False, soft_wrap=True)
    return max(len(records), shown)


def one_line(record: dict[str, float]) -> str:
    """A record as `step 12 | reward 0.750 | ...`, without what it lacks."""
    shown = [column for column in COLUMNS if column[1] in record]
    return " | ".join(f"{label} {cell(record, name, form)}" for label, name, form in shown)


def cell(record: dict[str, float], name: str, form: str) -> str:
    """One formatted value; empty where the record lacks it."""
    if name not in record:
        return ""
    value = record[name]
    return format(int(value) if form == "d" else value, form)


def dashboard(directory: RunDirectory) -> Group:
    """Progress bar, current phase, time left and the newest records."""
    records, status = read_metrics(directory.metrics), directory.read_status()
    table = Table(expand=False)
    for label, _, _ in COLUMNS:
        table.add_column(label, justify="right")
    for record in records[-RECENT_ROWS:]:
        table.add_row(*(cell(record, name, form) for _, name, form in COLUMNS))
    steps = status.get("steps", 0)
    done = int(records[-1]["step"]) if records else 0
    bar = ProgressBar(total=max(steps, 1), completed=done, width=60)
    # A bar alone does not end its line.
    return Group(Padding(bar), Text(headline(records, status, done, steps)), table)


def headline(records: list[dict[str, float]], status: dict, done: int, steps: int) -> str:
    """Step, phase and the time that the remaining steps will take at the recent pace."""
    if not status:
        return "starting the engine and the trainer"
    recent = [record["timing/step_s"] for record in records[-5:] if "timing/step_s" in record]
    pace = sum(recent) / len(recent) if recent else 0.0
    left = f", about {pace * (steps - done):.0f} s left" if pace else ""
    waiting = time.time() - status["since"]
    return f"step {status['step']} of {steps}: {status['phase']} ({waiting:.0f} s){left}"
