"""Asks Slurm whether it would take configurations; one process, since its imports take longest.

`ask_big.py RUNS '[[CONFIG, NODES or null, [OVERRIDE, ..]], ..]'` prints the answers as JSON; each
begins with `accepted` or `refused`."""

import io
import json
import sys
from pathlib import Path

from rich.console import Console

from megatron_credit.trainer.launching import start
from megatron_credit.trainer.load_config import load_config


def answer(config: str, nodes: int | None, overrides: list[str]) -> str:
    """What `megatron-credit launch slurm CONFIG --nodes N --test-only` comes to."""
    console = Console(file=io.StringIO(), width=1000)
    try:
        parsed = load_config(Path(config), overrides)
        resolved, plan = start.prepare(parsed, nodes=nodes, on_slurm=True)
        start.test_only(resolved, plan, console)
    except ValueError as error:
        return f"refused: {error}"
    return f"accepted: {console.file.getvalue()}"


def main() -> None:
    runs, questions = Path(sys.argv[1]), json.loads(sys.argv[2])
    answers = [
        answer(config, nodes, [f"run.directory={runs / str(number)}", *overrides])
        for number, (config, nodes, overrides) in enumerate(questions)
    ]
    sys.stdout.write(json.dumps(answers))


if __name__ == "__main__":
    main()
