"""The reward of a training rollout where it depends on more than the verdict: its length."""

import math
from collections.abc import Sequence
from dataclasses import replace

from megatron_credit.batch.rollout import Rollout
from megatron_credit.objective.overlong import overlong_penalty
from megatron_credit.rollouts.config import SamplingConfig
from megatron_credit.trainer.attempts import ATTEMPT


def shaped(rollout: Rollout, sampling: SamplingConfig) -> Rollout:
    """The rollout, with less reward where it came close to the length limit.

    Without a verdict there is no reward to lower. Of several attempts the last one counts, which is
    the one that the reward is of.
    """
    if sampling.overlong_buffer is None or not math.isfinite(rollout.reward):
        return rollout
    penalty = overlong_penalty(
        last_length(rollout),
        max_length=sampling.max_new_tokens,
        buffer=sampling.overlong_buffer,
    )
    return replace(rollout, reward=rollout.reward + penalty)


def last_length(rollout: Rollout) -> int:
    """Tokens of the response, or of its last attempt where it has several."""
    attempts = rollout.spans.get(ATTEMPT)
    return attempts[-1].end - attempts[-1].start if attempts else len(rollout.response_ids)


def overlong_metrics(rollouts: Sequence[Rollout], sampling: SamplingConfig) -> dict[str, float]:
    """The share of rollouts whose reward was lowered; nothing where none can be."""
    if sampling.overlong_buffer is None:
        return {}
    return {"reward/overlong": sum(map(is_penalised, rollouts)) / len(rollouts)}


def is_penalised(rollout: Rollout) -> bool:
    """Whether the reward is below that of the verdict; recorded rollouts come as they are."""
    return rollout.reward < (1.0 if rollout.outcome == "right" else 0.0)
