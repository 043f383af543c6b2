"""Where a run starts: which checkpoint it goes on from, and the directory made ready for it."""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from megatron_credit.mcore.architecture import read_architecture
from megatron_credit.mcore.digests import verify
from megatron_credit.mcore.manifest import DamagedCheckpoint, identity
from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.evidence_teacher import teacher_of
from megatron_credit.trainer.metrics import keep_metrics
from megatron_credit.trainer.run_directory import RunDirectory, checkpoint_step, replace_text

FIXED_SECTIONS = (
    "task",
    "data",
    "sampling",
    "attempts",
    "credit",
    "evidence",
    "saliency",
    "probes",
    "prm",
    "objective",
    "optimizer",
    "trainer",
)
"""Sections that a resumed run must share with what it goes on from, `trainer.steps` apart."""


@dataclass(frozen=True)
class Start:
    """Where a run begins."""

    checkpoint: Path | None = None
    """What it goes on from; None: from step 0."""
    damaged: dict[Path, str] = field(default_factory=dict)
    """Newer checkpoints that are not what was written, and what is wrong with them; `prepare` sets
    them aside."""

    @property
    def last_step(self) -> int:
        """Steps that are trained already."""
        return 0 if self.checkpoint is None else checkpoint_step(self.checkpoint)

    @property
    def remarks(self) -> list[str]:
        """What a person must hear of the checkpoints that were passed over, a line each."""
        return [
            f"WARNING: not going on from {path.name}: {problem}. It is kept beside the others as "
            f"*.damaged; going on from {self.checkpoint} instead"
            for path, problem in self.damaged.items()
        ]


def find_start(
    config: RunConfig,
    directory: RunDirectory,
    *,
    questions: dict[str, Any],
    again: bool = False,
) -> Start:
    """Where to begin; reads every byte of the checkpoint that it names, and changes nothing.

    `again`: an earlier attempt of the same launch was at work here, so that the directory's own
    checkpoints come before what run.resume says. ValueError: `never` with a directory that is in
    use, a checkpoint of another model or of other `questions`, a configuration that differs in
    what decides the curve, a step beyond the last, no checkpoint but damaged ones, or a damaged one
    that run.resume names.
    """
    resume, steps = config.run.resume, directory.checkpoint_steps()
    if again and (steps or resume == "never"):
        resume = "auto"
    if resume == "never":
        check_unused(directory, steps)
        return Start()
    if resume == "auto" and directory.config.is_file():
        check_same_run(config, RunConfig.model_validate_json(directory.config.read_text()))
    if resume == "auto":
        return newest_sound(config, directory, questions)
    checkpoint = resume.absolute()
    check_checkpoint(config, checkpoint, checkpoint_step(checkpoint), questions)
    check_nothing_later(directory, checkpoint)
    return Start(checkpoint)


def newest_sound(config: RunConfig, directory: RunDirectory, questions: dict[str, Any]) -> Start:
    """The newest checkpoint that is whole. ValueError where there are only damaged ones."""
    damaged: dict[Path, str] = {}
    for step in reversed(directory.checkpoint_steps()):
        checkpoint = directory.checkpoint(step)
        try:
            check_checkpoint(config, checkpoint, step, questions)
        except DamagedCheckpoint as error:
            damaged[checkpoint] = str(error)
        else:
            return Start(checkpoint, damaged)
    if damaged:
        raise ValueError(
            f"none of the checkpoints in {directory.checkpoints} can be gone on from: "
            + "; ".join(damaged.values())
            + "; put a good one there, name one by run.resume, or start over in another "
            "run.directory"
        )
    return Start()


def check_checkpoint(
    config: RunConfig, checkpoint: Path, step: int, questions: dict[str, Any]
) -> None:
    """The run can go on from it: ValueError says what does not fit; DamagedCheckpoint where it is
    not what was written."""
    if step > config.trainer.steps:
        raise ValueError(
            f"{checkpoint} is after step {step}, beyond trainer.steps={config.trainer.steps}; "
            "raise trainer.steps or start in another run.directory"
        )
    expected = checkpoint_identity(config, has_average=teacher_of(config).kind == "ema")
    manifest = verify(checkpoint, expected)
    if not config.run.allow_new_data:
        was = manifest["identity"].get("data", "")
        check_same_questions(checkpoint, was, questions["fingerprint"])


def check_unused(directory: RunDirectory, steps: list[int]) -> None:
    """ValueError where a run was in the directory."""
    if directory.metrics.exists() or steps:
        raise ValueError(
            f"run.resume='never', but {directory.root} already holds a run; name another "
            "run.directory, delete this one, or set run.resume='auto' to go on with it"
        )


def check_nothing_later(directory: RunDirectory, checkpoint: Path) -> None:
    """ValueError where the run would come to steps whose checkpoints exist already."""
    later = [step for step in directory.checkpoint_steps() if step > checkpoint_step(checkpoint)]
    if later:
        raise ValueError(
            f"run.resume={checkpoint}, but {directory.checkpoints} has a later checkpoint, "
            f"{directory.checkpoint(later[-1]).name}; name another run.directory, set "
            "run.resume='auto' to go on from that one, or move it away"
        )


def checkpoint_identity(config: RunConfig, *, has_average: bool) -> dict[str, str]:
    """What a checkpoint must have for this configuration's model to be loaded from it."""
    return identity(
        read_architecture(config.policy.model, config.policy.converter),
        dtype=config.policy.dtype,
        optimizer=config.optimizer.kind,
        teacher="ema" if has_average else "none",
    )


def check_same_questions(checkpoint: Path, was: str, now: str) -> None:
    """Raises ValueError where the run would go on with other prompts than it began with.

    A converted checkpoint has seen no prompts: its fingerprint is empty.
    """
    if was and was != now:
        raise ValueError(
            f"the data changed since {checkpoint} was written: its fingerprint was {was}, is "
            f"{now}; put the files and the [data] or [task] section back, or set "
            "run.allow_new_data = true to go on with the new data from that step on"
        )


def check_same_run(config: RunConfig, earlier: RunConfig) -> None:
    """Raises ValueError where the curve would no longer be that of one run."""
    new, old = json.loads(config.model_dump_json()), json.loads(earlier.model_dump_json())
    for tree in (new, old):
        tree["trainer"].pop("steps")
    pairs = [(section, new[section] or {}, old[section] or {}) for section in FIXED_SECTIONS]
    pairs += [("run.seed", {"seed": config.run.seed}, {"seed": earlier.run.seed})]
    changed = [
        f"{section}.{name}: was {was.get(name)!r}, is {now.get(name)!r}"
        for section, now, was in pairs
        for name in was | now
        if now.get(name) != was.get(name)
    ]
    if changed:
        raise ValueError(
            "this run directory was started with another configuration: "
            + "; ".join(changed)
            + "; put it back, or name another run.directory"
        )


def prepare(config: RunConfig, directory: RunDirectory, start: Start) -> IO[str]:
    """The directory created, locked, and cut back to where the run begins; the open lock.

    Damaged checkpoints are set aside, and logs/checkpoints.log says why.
    """
    directory.create()
    lock = directory.lock()
    replace_text(directory.config, config.model_dump_json(indent=2))
    if start.damaged:
        with (directory.logs / "checkpoints.log").open("a") as log:
            log.writelines(f"{time.strftime('%F %T')} {remark}\n" for remark in start.remarks)
        for path in start.damaged:
            directory.set_aside(path)
        # The steps up to the damaged one are progress again.
        directory.write_progress(start.last_step)
    begins = start.checkpoint is None
    keep_metrics(directory.metrics, last_step=-1 if begins else start.last_step)
    directory.keep_rollouts(last_step=start.last_step)
    directory.status.unlink(missing_ok=True)
    return lock
