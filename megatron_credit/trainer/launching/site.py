"""What Slurm says on the login node."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from credit_launch.environment import for_submission

from megatron_credit.errors import FailedProcess

ANSWER_S = 60.0
GPUS = re.compile(r"gpu:(?:[^:,()]+:)?(\d+)")


def has_slurm() -> bool:
    """Whether jobs can be submitted here."""
    return shutil.which("sbatch") is not None


def require_slurm() -> None:
    """ValueError where no jobs can be submitted."""
    if not has_slurm():
        raise ValueError(
            "there is no sbatch on this machine; type this where jobs are submitted, or use "
            "`megatron-credit launch local`"
        )


def call(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """A command of Slurm; FailedProcess where it does not answer."""
    try:
        return subprocess.run(
            list(command),
            env=for_submission(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
        )
    except FileNotFoundError:
        raise FailedProcess(f"there is no {command[0]} on this machine") from None
    except subprocess.TimeoutExpired:
        raise FailedProcess(f"{command[0]} did not answer within {ANSWER_S:.0f} s") from None


def gpus_of_a_node(partition: str) -> int | None:
    """Most GPUs of a node of the partition, of all nodes without one; None where Slurm does not
    say."""
    found = call(["sinfo", "-h", "-o", "%G", *(["-p", partition] if partition else [])])
    lines = found.stdout.split()
    if found.returncode or not lines:
        return None
    return max(sum(int(number) for number in GPUS.findall(line)) for line in lines)


def job_state(job: str) -> str:
    """PENDING, RUNNING, ...; empty where the queue does not have it (any more)."""
    found = call(["squeue", "-h", "-j", job, "-o", "%T"])
    return "" if found.returncode else found.stdout.split("\n")[0].strip()


def test_submission(script: Path) -> str:
    """Slurm's opinion of the script; ValueError with its words where it would refuse it."""
    found = call(["sbatch", "--test-only", str(script)])
    said = (found.stderr + found.stdout).strip()
    if found.returncode:
        raise refusal(script, said)
    return said


def refusal(script: Path, said: str) -> ValueError:
    """Slurm's words, and what to do where they do not say it."""
    hint = ""
    if "Invalid job array specification" in said:
        hint = (
            "; there are more engine jobs than the site's MaxArraySize allows (scontrol show "
            'config): use fewer rollout nodes, or launch.layout = "one"'
        )
    return ValueError(f"Slurm refuses {script}: {said}{hint}")


def submit(script: Path, options: Sequence[str] = ()) -> str:
    """The number of the new job; ValueError with Slurm's words where it refuses."""
    found = call(["sbatch", "--parsable", *options, str(script)])
    if found.returncode:
        raise refusal(script, found.stderr.strip())
    return found.stdout.strip().split(";")[0]


def cancel(job: str) -> None:
    """Ends a job; one that has ended is fine."""
    call(["scancel", job])
