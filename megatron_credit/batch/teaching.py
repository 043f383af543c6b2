"""What the rollouts of an optimizer step learn from their views, beside the surrogate. Pure.

Each such loss is a mean over tokens of its own, over the whole step: its count comes from all
sequences, which every rank has, so how they are cut into ranks and micro-batches changes nothing.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from megatron_credit.batch.sequence import TrainSequence
from megatron_credit.batch.views import Views

ContrastOf = tuple[str, int, int | Sequence[int] | None, int]
"""(kind, positive, negative or several, free), see `credit_kernels.evidence_loss`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenLoss:
    """A loss of single tokens, added to the step as coefficient x its mean over the masked ones."""

    name: str
    """Which number of the teaching's head: one of `Teaching.FOUND`."""
    coefficient: float
    mask: Sequence[Tensor]
    """bool [T] of each sequence; within its `mask_T`."""

    @property
    def count(self) -> int:
        """Tokens of the whole step that the mean is over."""
        return sum(int(mask_T.sum()) for mask_T in self.mask)

    @property
    def is_active(self) -> bool:
        """Whether it can change anything."""
        return self.coefficient != 0 and self.count > 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Teaching:
    """Views and the losses between them and their rollouts; one of the kinds below.

    ValueError where the losses do not fit the rollouts.
    """

    FOUND: ClassVar[tuple[str, ...]] = ()
    """What the kind's head finds of each token, in its order."""
    views: Sequence[Views]
    """One for each sequence of the step."""
    losses: tuple[TokenLoss, ...]

    def __post_init__(self) -> None:
        repeated = [name for name, n in Counter(one.name for one in self.losses).items() if n > 1]
        if repeated:
            raise ValueError(f"losses has {repeated[0]!r} more than once; give one of each name")
        for one in self.losses:
            if one.name not in self.FOUND:
                raise ValueError(
                    f"{type(self).__name__} has no loss {one.name!r}; expected one of "
                    f"{list(self.FOUND)}"
                )
            _check_tokens(f"mask of {one.name!r}", one.mask, self.views, torch.bool)
            _check_trained(one, self.views)

    @property
    def added(self) -> tuple[TokenLoss, ...]:
        """The losses that are part of the step at all, whether or not it has tokens of them."""
        return tuple(one for one in self.losses if one.coefficient != 0)

    @property
    def is_active(self) -> bool:
        """Whether any loss can change anything; if not, the views need not be read."""
        return any(one.is_active for one in self.losses)

    def of(self, sequences: Sequence[TrainSequence]) -> Self:
        """The same with these sequences for plain views; ValueError where they do not fit."""
        if len(sequences) != len(self.views):
            raise ValueError(
                f"teaching has views of {len(self.views)} rollouts and the step {len(sequences)} "
                "sequences; give the views of each sequence, in the same order"
            )
        pairs = zip(self.views, sequences, strict=True)
        return replace(self, views=[replace(one, plain=sequence) for one, sequence in pairs])


@dataclass(frozen=True, kw_only=True, eq=False)
class EvidenceTeaching(Teaching):
    """The reference and the evidence loss of `credit_kernels.evidence_loss` (VERPO)."""

    FOUND: ClassVar[tuple[str, ...]] = ("reference", "evidence")
    controller: Sequence[Tensor]
    """float32 [T] of each sequence: the weight w of its evidence."""
    contrast: ContrastOf
    """By context numbers, the plain one being 0."""
    divergence: str = "forward"
    top_k: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_tokens("controller", self.controller, self.views, torch.float32)


@dataclass(frozen=True, kw_only=True, eq=False)
class DistillationTeaching(Teaching):
    """The divergence from the teacher's view, context 1 (OPSD, SDPO, SRPO)."""

    FOUND: ClassVar[tuple[str, ...]] = ("distillation",)
    beta: float = 0.5
    """See `credit_kernels.divergence_loss`."""
    top_k: int | None = None
    """Tokens of the student's that are told apart; None: the whole vocabulary."""


def _check_tokens(
    name: str, given: Sequence[Tensor], views: Sequence[Views], dtype: torch.dtype
) -> None:
    if len(given) != len(views):
        raise ValueError(
            f"{name} has tensors for {len(given)} sequences; expected one for each of the "
            f"{len(views)} rollouts"
        )
    for number, (value_T, one) in enumerate(zip(given, views, strict=True)):
        expected = (one.plain.num_response,)
        if tuple(value_T.shape) != expected or value_T.dtype != dtype:
            raise ValueError(
                f"{name}, sequence {number}: shape {tuple(value_T.shape)} and type "
                f"{value_T.dtype}; expected {expected} and {dtype}, one for each response token"
            )


def _check_trained(loss: TokenLoss, views: Sequence[Views]) -> None:
    for number, (mask_T, one) in enumerate(zip(loss.mask, views, strict=True)):
        outside = int((mask_T & ~one.plain.mask_T).sum())
        if outside:
            raise ValueError(
                f"mask of {loss.name!r}, sequence {number}: {outside} tokens are outside of "
                "mask_T; a loss may only be taken of tokens that are trained"
            )
