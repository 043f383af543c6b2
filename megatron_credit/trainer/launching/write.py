"""The launcher's files in the run directory."""

import subprocess
from pathlib import Path

from credit_launch.files import LaunchFiles, publish
from credit_launch.pack import write_package
from credit_launch.plan import ROLLOUT, Plan, to_json
from credit_launch.render import render

from megatron_credit.trainer.config import RunConfig


def write_files(config: RunConfig, plan: Plan) -> LaunchFiles:
    """Writes plan, configuration and supervisor; ValueError where that is impossible."""
    files = LaunchFiles(Path(plan.run))
    try:
        files.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"run.directory={plan.run} cannot be created ({error.strerror}); name a directory that "
            "you may write to"
        ) from None
    publish(files.config, config.model_dump_json(indent=1) + "\n")
    publish(files.plan, to_json(plan))
    write_package(files.package)
    return files


def write_scripts(files: LaunchFiles, plan: Plan) -> list[Path]:
    """Writes the batch scripts, the trainer's first; ValueError where bash cannot read one."""
    publish(files.script, render(plan))
    if plan.layout == "jobs":
        publish(files.rollout_script, render(plan, ROLLOUT))
    scripts = [files.script, *([files.rollout_script] if plan.layout == "jobs" else [])]
    for script in scripts:
        check_syntax(script)
    return scripts


def check_syntax(script: Path) -> None:
    """ValueError where the prologue breaks the script."""
    found = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    if found.returncode:
        raise ValueError(f"launch.prologue is not valid shell: {found.stderr.strip()}")


def clear_marks(files: LaunchFiles) -> None:
    """Takes away what an earlier launch of this run left to say that it is over."""
    marks = [files.stop, files.stop_now, files.done, files.bad_nodes, files.job]
    marks += [*files.successors(), *files.root.glob(f"*/{files.bad_nodes.name}")]
    for path in marks:
        path.unlink(missing_ok=True)


def next_attempt(run: Path) -> int:
    """The number of the next attempt of a run."""
    known = LaunchFiles(run).attempts()
    return known[-1].number + 1 if known else 1
