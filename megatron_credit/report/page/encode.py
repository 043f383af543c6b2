"""Rollouts in few bytes: arrays in byte planes, deflated, one set of blobs a group.

Numbers are float32 of which the page keeps as many bits as fit. The bytes of equal significance
stand together (a plane), because deflate finds no order among whole floats.
"""

import base64
import json
import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_credit.batch.rollout import Rollout
from megatron_credit.batch.rollout_files import without_nan
from megatron_credit.report.page.run_files import RolloutGroup

Floats = NDArray[np.float32]
ID_BYTES = 3
MANTISSAS = (23, 15, 7, 6)
"""Bits of mantissa that a page may keep of each number: all, or to within 2^-16, 2^-8, 2^-7."""
SIGN_AND_EXPONENT = 9


@dataclass(frozen=True, kw_only=True)
class PackedGroup:
    """A group without the Python objects: 10,000 rollouts of them would fill the memory."""

    summary: dict[str, Any]
    """What the table shows, without NaN."""
    prompt_ids: NDArray[np.uint32]
    response_ids_T: NDArray[np.uint32]
    mask_T: NDArray[np.uint8]
    series: dict[str, Floats]
    """The numbers of the tokens, [T] each."""
    details: bytes
    """JSON of what only the viewer shows, deflated."""


def pack_group(group: RolloutGroup, texts: Sequence[str | None]) -> PackedGroup:
    """`texts` has the text of each rollout whose tokens do not spell it."""
    rollouts = group.rollouts
    series = [token_series(rollout) for rollout in rollouts]
    names = dict.fromkeys(name for found in series for name in found)
    return PackedGroup(
        summary=summary(group, [found["advantage"] for found in series])
        | {"spelled": all(text is None for text in texts)},
        prompt_ids=np.array(rollouts[0].prompt_ids, dtype=np.uint32),
        response_ids_T=joined([rollout.response_ids for rollout in rollouts], np.uint32),
        mask_T=joined([rollout.mask for rollout in rollouts], np.uint8),
        series={
            name: np.concatenate([
                found[name] if name in found else nothing(len(rollout.response_ids))
                for found, rollout in zip(series, rollouts, strict=True)
            ]).astype(np.float32)
            for name in names
        },
        details=deflated_json([
            details(rollout, text) for rollout, text in zip(rollouts, texts, strict=True)
        ]),
    )


def joined(parts: list[Any], dtype: Any) -> NDArray[Any]:
    """The parts, one after the other."""
    return np.concatenate([np.array(part, dtype=dtype) for part in parts])


def token_series(rollout: Rollout) -> dict[str, NDArray[np.float64]]:
    """Each series of numbers of the response tokens.

    `gap` (trainer's minus engine's log-prob) stands for policy_logprob: a difference of two rounded
    log-probs would be noise.
    """
    named = {"advantage": rollout.advantages, "logprob": rollout.logprobs, **rollout.token_values}
    series = {name: numbers(rollout, values) for name, values in named.items()}
    if "policy_logprob" in series:
        series["gap"] = series.pop("policy_logprob") - series["logprob"]
    return series


def numbers(rollout: Rollout, values: list[float]) -> NDArray[np.float64]:
    """The values as an array, NaN for each token where the list is empty."""
    return np.array(values) if values else nothing(len(rollout.response_ids))


def nothing(num_tokens: int) -> NDArray[np.float64]:
    """No number for any token."""
    return np.full(num_tokens, np.nan)


def summary(group: RolloutGroup, advantages: list[NDArray[np.float64]]) -> dict[str, Any]:
    """The row of the group and the columns of its rollouts."""
    first, rollouts = group.rollouts[0], group.rollouts
    return without_nan({
        "step": group.step,
        "prompt": first.prompt_id,
        "source": first.source,
        "answer": first.answer,
        "sample": [rollout.sample for rollout in rollouts],
        "reward": [rollout.reward for rollout in rollouts],
        "outcome": [rollout.outcome for rollout in rollouts],
        "finish": [rollout.finish_reason for rollout in rollouts],
        "parsed": [rollout.parsed for rollout in rollouts],
        "tokens": [len(rollout.response_ids) for rollout in rollouts],
        "credit": [
            mean_size(advantage[np.array(rollout.mask, dtype=bool)])
            for rollout, advantage in zip(rollouts, advantages, strict=True)
        ],
    })


def mean_size(advantage: NDArray[np.float64]) -> float:
    """Mean |advantage| of the tokens that have one; NaN without any."""
    known = advantage[~np.isnan(advantage)]
    return float(np.abs(known).mean()) if known.size else math.nan


def details(rollout: Rollout, text: str | None) -> dict[str, Any]:
    """What the viewer shows beside the tokens."""
    return {
        "versions": rollout.versions,
        "spans": rollout.spans,
        "evidence": rollout.evidence,
        "text": text,
    }


def encode_group(
    group: PackedGroup, names: Sequence[str], ids: "IdTable", mantissa: int
) -> list[str]:
    """The three blobs of a group: token ids and mask, numbers, details."""
    tokens = ids.places(np.concatenate([group.prompt_ids, group.response_ids_T]))
    num_tokens = len(group.response_ids_T)
    series = [group.series[name] if name in group.series else nothing(num_tokens) for name in names]
    values = np.concatenate(series).astype(np.float32)
    packed_ids = byte_planes(tokens, ID_BYTES) + group.mask_T.tobytes()
    packed_numbers = byte_planes(rounded(values, mantissa), num_planes(mantissa))
    blobs = (zlib.compress(packed_ids), zlib.compress(packed_numbers), group.details)
    return [base64.b64encode(blob).decode() for blob in blobs]


class IdTable:
    """The token ids that occur; a token is stored as its place, frequent ones first."""

    def __init__(self, groups: Iterable[PackedGroup]) -> None:
        counts = np.zeros(0, dtype=np.int64)
        for group in groups:
            for ids in (group.prompt_ids, group.response_ids_T):
                found = np.bincount(ids, minlength=len(counts))
                found[: len(counts)] += counts
                counts = found
        order = np.argsort(-counts, kind="stable")
        self.ids = order[: int((counts > 0).sum())]
        """The token ids by place."""
        self._place_of_id = np.zeros(len(counts), dtype=np.uint32)
        self._place_of_id[self.ids] = np.arange(len(self.ids), dtype=np.uint32)

    def places(self, ids: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """The place of each id."""
        return self._place_of_id[ids]


def num_planes(mantissa: int) -> int:
    """Bytes of a number with so many bits of mantissa."""
    return math.ceil((SIGN_AND_EXPONENT + mantissa) / 8)


def rounded(numbers: Floats, mantissa: int) -> NDArray[np.uint32]:
    """The bits of the numbers, rounded to nearest, in the lowest bytes of the words."""
    dropped = 23 - mantissa
    bits = np.where(np.isnan(numbers), np.float32(np.nan), numbers).view(np.uint32)
    kept = (bits + np.uint32((1 << dropped) >> 1)) >> np.uint32(dropped) << np.uint32(dropped)
    return kept >> np.uint32(8 * (4 - num_planes(mantissa)))


def byte_planes(words: NDArray[np.uint32], planes: int) -> bytes:
    """The lowest `planes` bytes of the words: first the highest byte of all, and so on down."""
    bytes_of_words = words.astype(">u4").view(np.uint8).reshape(-1, 4)
    return bytes_of_words[:, 4 - planes :].T.tobytes()


def deflated_json(value: Any) -> bytes:
    """Compact JSON, null for NaN, deflated."""
    text = json.dumps(without_nan(value), allow_nan=False, separators=(",", ":"))
    return zlib.compress(text.encode())
