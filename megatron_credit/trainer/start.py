"""Where a run starts: which checkpoint it goes on from, and the directory made ready for it."""

import json
import os
from pathlib import Path
from typing import IO, Any

from megatron_credit.mcore.architecture import read_architecture
from megatron_credit.mcore.manifest import identity, read_manifest
from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.evidence_teacher import teacher_of
from megatron_credit.trainer.metrics import keep_metrics
from megatron_credit.trainer.run_directory import RunDirectory, checkpoint_step

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


def choose_start(
    config: RunConfig, directory: RunDirectory, *, questions: dict[str, Any]
) -> Path | None:
    """The checkpoint to go on from; None starts at step 0.

    Raises ValueError: `never` with a directory that is in use, a checkpoint of another model or of
    other `questions`, a configuration that differs in what decides the curve, a step beyond the
    last.
    """
    resume, steps = config.run.resume, directory.checkpoint_steps()
    if resume == "never":
        if directory.metrics.exists() or steps:
            raise ValueError(
                f"run.resume='never', but {directory.root} already holds a run; name another "
                "run.directory, delete this one, or set run.resume='auto' to go on with it"
            )
        return None
    if resume == "auto":
        if directory.config.is_file():
            check_same_run(config, RunConfig.model_validate_json(directory.config.read_text()))
        checkpoint = directory.checkpoint(steps[-1]) if steps else None
    else:
        checkpoint = resume.absolute()
    if checkpoint is None:
        return None
    step = checkpoint_step(checkpoint)
    if step > config.trainer.steps:
        raise ValueError(
            f"{checkpoint} is after step {step}, beyond trainer.steps={config.trainer.steps}; "
            "raise trainer.steps or start in another run.directory"
        )
    expected = checkpoint_identity(config, has_average=teacher_of(config).kind == "ema")
    manifest = read_manifest(checkpoint, expected)
    if not config.run.allow_new_data:
        check_same_questions(checkpoint, manifest["identity"]["data"], questions["fingerprint"])
    return checkpoint


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


def prepare(config: RunConfig, directory: RunDirectory, checkpoint: Path | None) -> IO[str]:
    """The directory created, locked, and cut back to the checkpoint; the open lock."""
    directory.create()
    lock = directory.lock()
    partial = directory.config.with_suffix(".tmp")
    partial.write_text(config.model_dump_json(indent=2))
    os.replace(partial, directory.config)
    keep_metrics(directory.metrics, last_step=checkpoint_step(checkpoint) if checkpoint else -1)
    directory.status.unlink(missing_ok=True)
    return lock
