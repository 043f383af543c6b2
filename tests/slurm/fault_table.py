"""Writes docs/faults.md from what the fault tests recorded.

FAULT_TABLE=benchmarks/results/faults.json python -m pytest tests/slurm
python tests/slurm/fault_table.py benchmarks/results/faults.json > docs/faults.md
"""

import json
import sys
from datetime import date
from pathlib import Path

HEAD = """# What faults cost

Each row is a test in `tests/slurm`, on a Slurm of its own: slurmctld and 24 nodes that are
namespaces of one machine (2 cores, no GPU), where a node can really lose its power or its cable.
The rows of a rank, of memory and of a full disk are tests in
`tests/trainer/test_launch_faults.py`, of `launch local`.
Measured on {date}, several tests side by side and beside other work, with

```
FAULT_TABLE=benchmarks/results/faults.json ./test tests/slurm tests/trainer/test_launch_faults.py
python tests/slurm/fault_table.py benchmarks/results/faults.json > docs/faults.md
```

*Detected*: from the fault until the launcher or Slurm acted. *Resumed*: until the run's next step
was written, with the start of processes and, of real ones, the loading of the model. *Repeated*:
steps done again because no checkpoint held them. *Lost*: rollouts of the finished run that are
missing or there twice. *Equal*: metrics, rollouts and the exported weights are those of the
undisturbed run, bit for bit.

Here Slurm calls a node lost after 10 to 20 s (SlurmdTimeout=5) and makes a requeued job wait 6 s
(cred_expire=5). Where a site leaves both as they are, these take 5 and 2 minutes, and the rows grow
by that much. Stand-in tasks only say what they were told to do; of a full disk, that is the verdict
that no retry can help. A row without *resumed* is a run that must not go on.
"""
GROUPS = {
    "real": "Real trainer, real engines (one node each; 12 steps, a checkpoint every 3)",
    "stand-in": "Stand-in tasks: the launcher alone (a checkpoint every 3 to 5 steps)",
}
COLUMNS = ("fault", "detected", "resumed", "repeated", "lost", "equal", "what happens")
COUNTS = ("steps_repeated", "rollouts_lost")


def seconds(value: float | None) -> str:
    """`12 s`; nothing where there is none."""
    if value is None:
        return ""
    return f"{value:.1f} s" if value < 9.95 else f"{value:.0f} s"


def cells(row: dict) -> list[str]:
    """A row of the table."""
    equal = {None: "", True: "yes", False: "**no**"}[row["curve_equal"]]
    counts = ["" if row[name] is None else str(row[name]) for name in COUNTS]
    times = [seconds(row["detected_s"]), seconds(row["resumed_s"])]
    return [row["fault"], *times, *counts, equal, row["outcome"]]


def table(rows: list[dict]) -> str:
    """Markdown; columns that say nothing are left out."""
    texts = [cells(row) for row in sorted(rows, key=lambda row: row["fault"])]
    kept = [k for k in range(len(COLUMNS)) if any(text[k] for text in texts)]
    lines = [[COLUMNS[k] for k in kept], ["---"] * len(kept)]
    lines += [[text[k] for k in kept] for text in texts]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    rows = json.loads(Path(sys.argv[1]).read_text())
    newest = date.fromisoformat(max(row["measured"] for row in rows))
    parts = [HEAD.format(date=f"{newest.day} {newest:%B %Y}")]
    for tasks, title in GROUPS.items():
        found = [row for row in rows if row["tasks"] == tasks]
        if found:
            parts.append(f"## {title}\n\n{table(found)}\n")
    sys.stdout.write("\n".join(parts))


if __name__ == "__main__":
    main()
