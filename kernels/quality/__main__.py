"""Quality of every Triton program on GPUs that nobody has here, from its machine code.

    python kernels/quality --out kernels/bench/results/kernel_quality.json

Compiles the programs for each target, prints what they cost and exits with 1 where one spills a
register, lacks the instructions that make it fast, or exceeds its budget in budgets.toml.
"""

import argparse
import datetime
import json
import sys
import tomllib
from dataclasses import asdict, fields
from pathlib import Path

import triton
from binary import Cost, cost_of
from evidence_jobs import evidence_jobs
from jobs import Job, all_jobs

BUDGETS = Path(__file__).parent / "budgets.toml"
COLUMNS = [field.name for field in fields(Cost)]


def violations(job: Job, cost: Cost, budgets: dict) -> list[str]:
    """What is wrong with a program, in words."""
    where = f"{job.name} on {job.target}"
    budget = budgets.get(job.name, {}).get(job.target)
    if budget is None:
        return [f"{where} has no budget in {BUDGETS.name}"]
    found = [
        f"{where}: {key} {value}, budget {budget[key]}"
        for key, value in asdict(cost).items()
        if key in budget and value > budget[key]
    ]
    if cost.spills:
        found.append(f"{where}: {cost.spills} spills; none is allowed")
    if job.tile is not None and cost.tensor_core == 0:
        found.append(f"{where}: no tensor-core instruction")
    if job.tile is not None and cost.async_copy == 0 and job.target != "gfx942":
        found.append(f"{where}: no asynchronous copy from memory")
    return found


def row(job: Job, cost: Cost) -> str:
    values = ["-" if value is None else value for value in asdict(cost).values()]
    return f"{job.name:40}{job.target:8}" + "".join(f"{value:>18}" for value in values)


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    parser.add_argument("--budgets", type=Path, default=BUDGETS)
    parser.add_argument("--only", help="programs whose name and target contain this")
    arguments = parser.parse_args()
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set, so that Triton compiles nothing; unset it")
    budgets = tomllib.loads(arguments.budgets.read_text())
    jobs = all_jobs() + evidence_jobs()
    jobs = [job for job in jobs if (arguments.only or "") in f"{job.name}/{job.target}"]
    costs = [cost_of(job.compile(), job.target, job.tile) for job in jobs]
    lines = [f"{'program':40}{'target':8}" + "".join(f"{name:>18}" for name in COLUMNS)]
    lines += [row(job, cost) for job, cost in zip(jobs, costs, strict=True)]
    found = [
        line
        for job, cost in zip(jobs, costs, strict=True)
        for line in violations(job, cost, budgets)
    ]
    sys.stdout.write("\n".join([*lines, *found, f"{len(jobs)} programs, {len(found)} problems"]))
    sys.stdout.write("\n")
    if arguments.out:
        report = {
            "triton": triton.__version__,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "programs": [
                {"name": job.name, "target": job.target} | asdict(cost)
                for job, cost in zip(jobs, costs, strict=True)
            ],
        }
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if found or not jobs else 0


if __name__ == "__main__":
    sys.exit(main())
