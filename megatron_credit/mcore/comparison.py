"""What is computed of several contexts of the same tokens, some of which may be absent."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from credit_kernels import evidence_stats
from credit_kernels.evidence.contrast import Contrast, ContrastArgument

COMPARED = 4
"""Numbers of each context: log-prob, entropy and two KLs."""
CONTRASTED = 4
"""Numbers of a contrast: alpha, target, mean and cost."""


@dataclass(frozen=True)
class Comparison:
    """What is computed of several contexts; see `credit_kernels.evidence_stats`."""

    num_contexts: int
    contrast: ContrastArgument | None = None
    divergence: str = "forward"
    top_k: int | None = None

    def check(self, temperature: float) -> None:
        """ValueError for what the kernels refuse, on every rank: later, some would wait for the
        others."""
        evidence_stats(
            torch.zeros(self.num_contexts, 0, 1),
            torch.zeros(1, 1),
            torch.zeros(0, dtype=torch.int64),
            contrast=self.contrast,
            temperature=temperature,
            divergence=self.divergence,
            top_k=self.top_k,
        )

    @property
    def num_values(self) -> int:
        """Numbers of a token."""
        contrasted = 0 if self.contrast is None else CONTRASTED
        return COMPARED * self.num_contexts + contrasted

    def within(self, contexts: Sequence[int]) -> ContrastArgument | None:
        """The contrast, by places among these contexts; None where one that it needs is absent.

        Of several negatives those that are present are averaged; one is enough.
        """
        if self.contrast is None:
            return None
        whole = Contrast.parse(self.contrast, self.num_contexts)
        negatives = tuple(contexts.index(c) for c in whole.negatives if c in contexts)
        if whole.positive not in contexts or whole.free not in contexts or not negatives:
            return None
        negative = None if whole.kind == "fixed" else negatives
        return whole.kind, contexts.index(whole.positive), negative, contexts.index(whole.free)

    def free_alone(self, contexts: Sequence[int]) -> ContrastArgument | None:
        """A contrast of nothing that has the evidence-free context; None where it is absent."""
        assert self.contrast is not None
        free = Contrast.parse(self.contrast, self.num_contexts).free
        if free not in contexts:
            return None
        return "fixed", contexts.index(free), None, contexts.index(free)
