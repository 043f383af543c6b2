"""What the rollout side hands over: token ids and numbers, never text to be tokenised again."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple


class VersionSpan(NamedTuple):
    """Response tokens [start, end) were sampled by weights number `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One question: chat messages, the reference answer and what the task knows about it."""

    id: str
    messages: list[dict[str, str]]
    answer: str
    metadata: dict = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sampled response as the engine returned it.

    `logprobs` are those of the sampling distribution (after temperature), one for each token.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    versions: list[VersionSpan]


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One graded response; a line of `rollouts/step-*.jsonl` has these names.

    `mask` is True on tokens that the policy sampled; `reward` is NaN where there is no verdict;
    `advantages` has one number for each response token, empty before credit was assigned.
    """

    prompt_id: str
    sample: int
    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]
    mask: list[bool]
    versions: list[VersionSpan]
    finish_reason: str
    text: str
    answer: str
    reward: float
    advantages: list[float] = field(default_factory=list)


def write_rollouts(path: Path, rollouts: Iterable[Rollout]) -> None:
    """Writes one JSON object a line; the file appears whole or not at all."""
    partial = path.with_suffix(".tmp")
    with partial.open("w") as lines:
        for rollout in rollouts:
            lines.write(json.dumps(asdict(rollout)) + "\n")
    partial.replace(path)


def read_rollouts(path: Path) -> Iterator[Rollout]:
    """The rollouts of a file written by `write_rollouts`, in order."""
    with path.open() as lines:
        for line in lines:
            record = json.loads(line)
            record["versions"] = [VersionSpan(*span) for span in record["versions"]]
            yield Rollout(**record)
