"""Which responses count, and which of their steps is the culprit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from megatron_credit.batch.rollout import Rollout
from megatron_credit.credit.baselines import is_wrong, sequence_advantage
from megatron_credit.credit.step_spans import step_ids, step_texts
from megatron_credit.tasks.chain_sum_steps import first_wrong_step
from megatron_credit.trainer.signals.token_texts import token_texts

SEPARATOR = ";"
"""What ends a step of a chain sum."""
EXPRESSION = "expression"
"""Metadata of a prompt that holds the sum."""
Groups = Literal["mixed", "all_wrong"]
"""Of which rewards: some right and some wrong, or all wrong."""


@dataclass(frozen=True)
class Case:
    """A wrong response of which the first wrong step is known."""

    group: int
    """Number of its prompt in the record."""
    sample: int
    """Its place in the group."""
    tokens: tuple[int, ...]
    """The trained ones, as places in the response."""
    steps: tuple[int, ...]
    """The step of each of these."""
    culprit: int
    """The first wrong step."""


def find_cases(
    groups: Sequence[Sequence[Rollout]], tokenizer: PreTrainedTokenizerBase
) -> dict[Groups, list[Case]]:
    """The wrong responses of mixed groups and of groups in which all are wrong.

    ValueError where the record does not say what was asked.
    """
    found: dict[Groups, list[Case]] = {"mixed": [], "all_wrong": []}
    for number, group in enumerate(groups):
        reward_N = torch.tensor([rollout.reward for rollout in group], dtype=torch.float64)
        wrong_N, advantage_N = is_wrong(reward_N), sequence_advantage("grpo", reward_N)
        kind: Groups = "mixed" if advantage_N.any() else "all_wrong"
        for sample in wrong_N.nonzero()[:, 0].tolist():
            case = _case(number, sample, group[sample], tokenizer)
            if case is not None:
                found[kind].append(case)
    return found


def _case(
    group: int, sample: int, rollout: Rollout, tokenizer: PreTrainedTokenizerBase
) -> Case | None:
    if EXPRESSION not in rollout.metadata:
        raise ValueError(
            f"rollout {sample} of {rollout.prompt_id} has no {EXPRESSION!r} in its metadata; the "
            "first wrong step is known for rollouts of the task chain_sum that this version "
            "recorded: sample them again"
        )
    texts = token_texts(tokenizer, rollout.response_ids)
    ids = step_ids(texts, separator=SEPARATOR)
    culprit = first_wrong_step(rollout.metadata[EXPRESSION], step_texts(texts, ids))
    tokens = tuple(place for place, trained in enumerate(rollout.mask) if trained)
    steps = tuple(ids[place] for place in tokens)
    return Case(group, sample, tokens, steps, culprit) if culprit in steps else None
