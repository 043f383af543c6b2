"""Submits a plan given as JSON, as the ordinary user that runs this program; prints the job."""

import json
import subprocess
import sys
import time
from pathlib import Path

from credit_launch.environment import for_submission
from credit_launch.files import LaunchFiles, publish
from credit_launch.pack import write_package
from credit_launch.plan import from_json, to_json
from credit_launch.render import render


def sbatch(script: Path, *options: str) -> str:
    """The number of the submitted job."""
    result = subprocess.run(
        ["sbatch", "--parsable", *options, str(script)],
        env=for_submission(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    if result.returncode:
        sys.exit(result.stderr)
    return result.stdout.strip()


def main() -> None:
    plan = from_json(sys.argv[1])
    files = LaunchFiles(Path(plan.run))
    files.root.mkdir()
    write_package(files.package)
    publish(files.plan, to_json(plan))
    files.script.write_text(render(plan))
    job, rollout_job = sbatch(files.script), None
    if plan.layout == "jobs":
        files.rollout_script.write_text(render(plan, "rollout"))
        rollout_job = sbatch(files.rollout_script, f"--dependency=after:{job}")
    record = {"job": job, "rollout_job": rollout_job, "submitted": time.time()}
    publish(files.job, json.dumps(record))


if __name__ == "__main__":
    main()
