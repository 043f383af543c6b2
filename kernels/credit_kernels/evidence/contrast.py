"""Which contexts are contrasted, and how: values without tensors of the problem."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from credit_kernels.vocab_parallel import VocabShard

KINDS = ("fec", "pair", "fixed")
DIVERGENCES = ("forward", "reverse")

ContrastArgument = tuple[str, int, int | Sequence[int] | None, int]
"""(kind, positive, negative or several, free), as callers write it."""


@dataclass(frozen=True)
class Contrast:
    """Evidence of a positive context against negative ones, beside one that is free of evidence.

    The numbers are contexts: 0 is the student, also when it stands for another role. `fixed` has
    the evidence-free context for its negative. A contrast is linear in the roles (positive,
    negative, free), in their probabilities or, for the reverse divergence, in their log-probs.
    """

    kind: str
    positive: int
    negatives: tuple[int, ...]
    """Several: the mean of their probabilities."""
    free: int

    @classmethod
    def parse(cls, argument: ContrastArgument, num_contexts: int) -> "Contrast":
        """ValueError for anything but (kind, positive, negative, free) with contexts we have."""
        if not isinstance(argument, tuple) or len(argument) != 4 or argument[0] not in KINDS:
            raise ValueError(
                f"contrast={argument!r}; expected (kind, positive, negative, free) with a kind of "
                f"{list(KINDS)} and numbers of contexts"
            )
        kind, positive, negative, free = argument
        if (negative is None) != (kind == "fixed"):
            expected = "None for its negative" if kind == "fixed" else "a negative context"
            raise ValueError(f"contrast={argument!r}: {kind} takes {expected}")
        if negative is None:
            negatives = (free,)
        else:
            negatives = tuple(negative) if isinstance(negative, Sequence) else (negative,)
        for context in (positive, *negatives, free):
            if not isinstance(context, int) or not 0 <= context < num_contexts:
                raise ValueError(
                    f"contrast={argument!r} names context {context!r}; hidden has the contexts "
                    f"0..{num_contexts - 1}"
                )
        if not negatives:
            raise ValueError(f"contrast={argument!r}: expected at least one negative context")
        return cls(kind, positive, negatives, free)

    @property
    def named(self) -> tuple[int, ...]:
        """The contexts that the contrast reads, each once."""
        return tuple(sorted({self.positive, *self.negatives, self.free}))

    @property
    def is_mixed(self) -> bool:
        """The negative is a mean of several contexts."""
        return len(self.negatives) > 1

    def roles(self, num_contexts: int) -> tuple[int, ...]:
        """Places of the roles; the mean of several negatives comes after all contexts."""
        negative = num_contexts if self.is_mixed else self.negatives[0]
        return (self.positive, negative, self.free)[: len(self.basis())]

    def num_variables(self) -> int:
        """task and, for fec, nuisance."""
        return 2 if self.kind == "fec" else 1

    def basis(self) -> Tensor:
        """[X, J] float64: task, for fec nuisance, and the last role to complete the basis.

        Task and nuisance are small where the contexts nearly agree, which is why their moments
        are summed rather than those of the roles.
        """
        if self.kind == "fec":
            rows = [[1.0, -1.0, 0.0], [0.5, 0.5, -1.0], [0.0, 0.0, 1.0]]
        else:
            rows = [[1.0, -1.0], [0.0, 1.0]]
        return torch.tensor(rows, dtype=torch.float64)

    def coefficients(self, alpha_T: Tensor) -> Tensor:
        """[J, T]: what task - alpha nuisance takes of each role."""
        basis = self.basis().to(alpha_T)
        if self.num_variables() == 1:
            return basis[0][:, None].expand(-1, len(alpha_T))
        return basis[0][:, None] - alpha_T * basis[1][:, None]


@dataclass(frozen=True)
class Options:
    """What an evidence operation computes, apart from its tensors."""

    contrast: Contrast | None
    divergence: str
    top_k: int | None
    temperature: float
    softcap: float | None
    shard: VocabShard
    keeps_units: bool = False
    """The forward pass of a loss makes its gradient and keeps it; see `units`."""
