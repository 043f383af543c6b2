"""Groups whose rewards are all equal give way to groups of further prompts (DAPO, 2503.14476).

A group whose rewards are equal has no advantage. Unlike in the paper the tries are bounded, and
each samples as many groups as are missing, not a batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_credit.batch.rollout import Rollout

STRIDE = 2**40
"""Indices between the prompt of a place and the next one that may stand in for it: beyond every
index in use, and apart from where tasks look for substitutes of held-out questions."""


class GroupSource(Protocol):
    """Who samples the groups of a step."""

    def train_groups(
        self,
        step: int,
        *,
        num_prompts: int,
        num_samples: int,
        places: Sequence[int] | None = None,
        number: int = 0,
    ) -> list[list[Rollout]]:
        """The groups of all `num_prompts` places of a step, or of some; `number` counts the tries
        from 1 on, each of which has prompts of its own."""
        ...


@dataclass(frozen=True, kw_only=True)
class StepGroups:
    """The groups that a step trains on, and what they cost."""

    groups: list[list[Rollout]]
    num_replaced: int
    """Groups that stand where another one was dropped."""
    num_dropped: int
    """Rollouts that were sampled and dropped."""

    def metrics(self) -> dict[str, float]:
        """The share that was replaced, and the rollouts dropped."""
        return {
            "group/resampled": self.num_replaced / len(self.groups),
            "rollout/dropped": float(self.num_dropped),
        }


def step_groups(
    source: GroupSource, step: int, *, num_prompts: int, num_samples: int, tries: int
) -> StepGroups:
    """The groups of a step, in order; each with equal rewards is replaced, `tries` times at most.

    What a place holds after its last try stays there whatever its rewards, so that every step has
    its size. All follows from the step, the try and the weights that sample.
    """
    groups = list(source.train_groups(step, num_prompts=num_prompts, num_samples=num_samples))
    replaced: set[int] = set()
    num_dropped = 0
    for number in range(1, tries + 1):
        places = [place for place, group in enumerate(groups) if has_equal_rewards(group)]
        if not places:
            break
        found = source.train_groups(
            step, num_prompts=num_prompts, num_samples=num_samples, places=places, number=number
        )
        for place, group in zip(places, found, strict=True):
            num_dropped += len(groups[place])
            groups[place] = group
        replaced.update(places)
    return StepGroups(groups=groups, num_replaced=len(replaced), num_dropped=num_dropped)


def has_equal_rewards(group: Sequence[Rollout]) -> bool:
    """Whether no two rewards of the group differ, so that it teaches nothing; those without a
    verdict do not count."""
    return len({rollout.reward for rollout in group if math.isfinite(rollout.reward)}) <= 1
