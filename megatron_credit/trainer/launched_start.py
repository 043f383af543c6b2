"""How a launched run begins: the first trainer node decides, the others read it."""

import json
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from credit_launch.plan import read_plan

from megatron_credit.trainer.checks import check_run
from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.launched_attempt import LaunchedAttempt
from megatron_credit.trainer.local import sampling_of
from megatron_credit.trainer.rollout_meta import write_meta
from megatron_credit.trainer.run_directory import RunDirectory, replace_text
from megatron_credit.trainer.start import find_start, prepare

POLL_S = 0.2
ORPHANS_S = 60.0
"""How long processes of an earlier attempt, on nodes that were cut off, may keep the directory."""


@dataclass
class LaunchedStart:
    """What the ranks begin with. A context: the first node keeps the run's directory in it."""

    checkpoint: Path | None
    is_finished: bool
    """The run was complete before."""
    lock: int | None = None
    """Descriptor of the directory's lock, on the first node."""
    held: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.held.close()


def begin(config: RunConfig, directory: RunDirectory, attempt: LaunchedAttempt) -> LaunchedStart:
    """The start, chosen, prepared and published. ValueError for what the user can correct."""
    checked = check_run(config)
    config = checked.config
    directory.create()
    wait_for_orphans(directory)
    plan = read_plan(attempt.directory.parent / "plan.json")
    start = find_start(
        config,
        directory,
        questions=checked.questions,
        again=attempt.number > plan.first_attempt,
    )
    held = ExitStack()
    lock = held.enter_context(prepare(config, directory, start))
    for remark in start.remarks:
        sys.stderr.write(f"{remark}\n")
    directory.write_data(checked.questions)
    sampling = sampling_of(config, checked, None)
    if sampling is not None:
        write_meta(directory.rollouts, sampling)
    is_finished = start.last_step == config.trainer.steps and directory.model.is_dir()
    named = None if start.checkpoint is None else str(start.checkpoint)
    replace_text(attempt.start, json.dumps({"checkpoint": named, "finished": is_finished}))
    return LaunchedStart(start.checkpoint, is_finished, lock.fileno(), held)


def read_start(attempt: LaunchedAttempt) -> LaunchedStart:
    """What the first node chose; waits for it, and is ended with the task if it fails."""
    while not attempt.start.exists():
        time.sleep(POLL_S)
    found = json.loads(attempt.start.read_text())
    checkpoint = found["checkpoint"]
    return LaunchedStart(Path(checkpoint) if checkpoint else None, found["finished"])


def wait_for_orphans(directory: RunDirectory) -> None:
    """Returns when nobody is at work in the directory any more. ValueError where somebody stays.

    An earlier attempt that was cut off from the cluster ends as soon as it sees this one.
    """
    deadline = time.monotonic() + ORPHANS_S
    while True:
        try:
            directory.lock().close()
        except ValueError:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_S)
        else:
            return
