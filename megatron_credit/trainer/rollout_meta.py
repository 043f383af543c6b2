"""How the rollouts of a directory were sampled: the meta.json beside their files."""

import hashlib
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from megatron_credit.mcore.architecture import read_architecture
from megatron_credit.settings import Settings
from megatron_credit.trainer.config import RunConfig

META = "meta.json"
EACH_STEPS_OWN = "the policy before each step"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
LOADED_ALIKE = ("architecture", "tokenizer", "temperature", "max_new_tokens", "overlong_buffer")
"""What a run that trains on the rollouts must share with them."""


class RolloutMeta(Settings):
    """What the numbers in the records depend on."""

    version: Literal[1] = 1
    """Of this file's form."""
    weights: str
    """The directory of the weights that sampled, or that each step had those of the step before."""
    architecture: str
    """Fingerprint of the model's configuration."""
    tokenizer: str
    """Digest of the tokenizer, without which token ids mean nothing."""
    questions: str
    """Fingerprint of prompts and answers."""
    seed: int
    """run.seed"""
    prompts_per_step: int
    """Groups of a file."""
    samples_per_prompt: int
    """Rollouts of a group."""
    temperature: float
    """What the recorded log-probs are those of."""
    max_new_tokens: int
    """Longer responses were truncated."""
    stop_token_ids: tuple[int, ...]
    """Empty: the tokenizer's end-of-sequence token."""
    max_attempts: int = 1
    """Attempts of a rollout at most."""
    feedback: str = ""
    """What was said after a failed attempt, where there were several."""
    overlong_buffer: int | None = None
    """Over so many tokens before the limit the recorded rewards fall; None: they are verdicts."""
    resample_tries: int = 0
    """How often groups with equal rewards were replaced at most."""


def describe_sampling(config: RunConfig, *, questions: str, weights: str) -> RolloutMeta:
    """What a run with this configuration samples."""
    return RolloutMeta(
        weights=weights,
        architecture=read_architecture(config.policy.model, config.policy.converter).fingerprint(),
        tokenizer=tokenizer_digest(config.policy.model),
        questions=questions,
        seed=config.run.seed,
        prompts_per_step=config.trainer.prompts_per_step,
        samples_per_prompt=config.trainer.samples_per_prompt,
        temperature=config.sampling.temperature,
        max_new_tokens=config.sampling.max_new_tokens,
        stop_token_ids=config.sampling.stop_token_ids,
        max_attempts=config.max_attempts,
        feedback="" if config.attempts is None else config.attempts.feedback,
        overlong_buffer=config.sampling.overlong_buffer,
        resample_tries=config.trainer.resample_tries,
    )


def tokenizer_digest(model: Path) -> str:
    """Sixteen hexadecimal digits of the file that holds the vocabulary; empty without one."""
    found = [model / name for name in TOKENIZER_FILES if (model / name).is_file()]
    return hashlib.sha256(found[0].read_bytes()).hexdigest()[:16] if found else ""


def write_meta(directory: Path, meta: RolloutMeta) -> None:
    """Writes the meta.json of the directory."""
    partial = (directory / META).with_suffix(".tmp")
    partial.write_text(meta.model_dump_json(indent=2) + "\n")
    partial.replace(directory / META)


def read_meta(record: Path) -> RolloutMeta | None:
    """The meta.json of a directory of rollout files, or of the one that a file stands in.

    None without one; ValueError where it is broken.
    """
    path = (record if record.is_dir() else record.parent) / META
    if not path.is_file():
        return None
    try:
        return RolloutMeta.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "file"
        raise ValueError(f"{path} is none of ours: {where}: {first['msg']}") from None


def differences(found: RolloutMeta, expected: RolloutMeta, names: tuple[str, ...]) -> str:
    """The fields of these names that differ, in words; empty where none does."""
    was, now = found.model_dump(), expected.model_dump()
    return "; ".join(
        f"{name}: was {was[name]!r}, is {now[name]!r}" for name in names if was[name] != now[name]
    )


def check_same_sampling(directory: Path, expected: RolloutMeta) -> None:
    """ValueError where the directory holds rollouts that were sampled otherwise."""
    found = read_meta(directory)
    if found is None:
        return
    changed = differences(found, expected, tuple(RolloutMeta.model_fields))
    if changed:
        raise ValueError(
            f"{directory} holds rollouts that were sampled otherwise: {changed}; put that back, or "
            "name another --output"
        )


def check_loadable(record: Path, found: RolloutMeta, expected: RolloutMeta) -> None:
    """ValueError where the record's log-probs or token ids are not those of the run's policy."""
    changed = differences(found, expected, LOADED_ALIKE)
    if changed:
        raise ValueError(
            f"the rollouts in {record} do not fit this configuration: {changed}; use the model and "
            "the sampling section that they were sampled with"
        )
