"""Several views of one response: the same token ids behind the plain context and behind others.

Shape letters: L tokens of one sequence, T response tokens, C contexts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from megatron_credit.batch.sequence import TrainSequence


@dataclass(frozen=True, kw_only=True)
class View:
    """A response behind a context that is not its own: the token ids of both."""

    token_ids_L: Tensor
    """int64: prompt, then response."""
    num_prompt: int
    """At least one: the first response token is read where the prompt ends."""


@dataclass(frozen=True, kw_only=True)
class Views:
    """One rollout behind C contexts: 0 is the plain one, c the one of teacher c - 1.

    ValueError where a view does not end in the response of the plain one, token by token.
    """

    plain: TrainSequence
    teachers: tuple[View | None, ...] = ()
    """None: this rollout has no such evidence."""

    def __post_init__(self) -> None:
        for number, view in enumerate(self.teachers, start=1):
            if view is not None:
                _check_response(view, self.plain, f"context {number}")

    @classmethod
    def behind(cls, plain: TrainSequence, prompts: Sequence[Tensor | None]) -> Self:
        """The rollout's own response ids behind each of these prompts (int64); None: absent."""
        response_T = plain.token_ids_L[plain.num_prompt :]
        teachers = (
            None
            if prompt_L is None
            else View(token_ids_L=torch.cat([prompt_L, response_T]), num_prompt=len(prompt_L))
            for prompt_L in prompts
        )
        return cls(plain=plain, teachers=tuple(teachers))

    @property
    def num_contexts(self) -> int:
        """C, the plain one and absent ones included."""
        return 1 + len(self.teachers)


@dataclass(frozen=True)
class ViewScores:
    """Statistics of each response token of one rollout, float32 on the CPU, in nats.

    NaN where a view that they need is absent. Those of the contrast are None where none was asked
    for; they are named as the signals of a group are.
    """

    logprob_CT: Tensor
    entropy_CT: Tensor
    kl_teacher_student_CT: Tensor
    """KL(context || plain); row 0 is zero."""
    kl_student_teacher_CT: Tensor
    """KL(plain || context); row 0 is zero."""
    contrast_alpha_T: Tensor | None = None
    """How much of the nuisance is taken from the task; 0 for pair and fixed."""
    contrast_target_T: Tensor | None = None
    """d of the sampled token."""
    contrast_mean_T: Tensor | None = None
    """E_p[d]."""
    contrast_cost_T: Tensor | None = None
    """Var_p(d)."""


def count_contexts(views: Sequence[Views]) -> int:
    """How many contexts each of these rollouts has; 1 if there are none.

    ValueError where they differ: context numbers would not mean the same.
    """
    count = views[0].num_contexts if views else 1
    for number, one in enumerate(views):
        if one.num_contexts != count:
            raise ValueError(
                f"rollout {number} has {one.num_contexts} contexts and rollout 0 has {count}; "
                "give None for a context that a rollout lacks"
            )
    return count


def _check_response(view: View, plain: TrainSequence, name: str) -> None:
    token_ids_L = view.token_ids_L
    if token_ids_L.dim() != 1 or token_ids_L.dtype != torch.int64:
        raise ValueError(
            f"{name}: token_ids_L has shape {tuple(token_ids_L.shape)} and type "
            f"{token_ids_L.dtype}; expected one dimension of int64"
        )
    num_response = len(token_ids_L) - view.num_prompt
    if view.num_prompt < 1 or num_response != plain.num_response:
        raise ValueError(
            f"{name}: {len(token_ids_L)} tokens with num_prompt={view.num_prompt}; expected at "
            f"least one token of a prompt, then the {plain.num_response} of the response"
        )
    found_T = token_ids_L[view.num_prompt :]
    differs_T = found_T != plain.token_ids_L[plain.num_prompt :]
    if differs_T.any():
        at = int(differs_T.nonzero()[0])
        raise ValueError(
            f"{name}: response token {at} is {int(found_T[at])}, in the plain view it is "
            f"{int(plain.token_ids_L[plain.num_prompt + at])}; put the response's own ids behind "
            "every context and tokenise nothing again"
        )
