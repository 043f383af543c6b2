"""The statistics of several contexts, how those of parts of the vocabulary merge, and what follows.

Statistics over some columns are relative to each context's softmax over those columns: over one
rank's columns they need no communication, and over the whole vocabulary they are the quantities
themselves. P counts contexts and, behind them, the mean of several negatives where there is one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from credit_kernels.evidence.contrast import Contrast
from credit_kernels.evidence.forward import ForwardSums
from credit_kernels.evidence.reverse import ReverseSums
from credit_kernels.evidence.sums import pack, unpack
from credit_kernels.vocab_parallel import LocalStats, finish
from credit_kernels.vocab_parallel import concatenate as concatenate_softmax


@dataclass(frozen=True, eq=False)
class EvidenceStats:
    """Statistics of every token; 0 for ignored ones, None for what was not asked for."""

    logprob_CT: Tensor
    entropy_CT: Tensor
    kl_teacher_student_CT: Tensor
    """KL(context || student); row 0 is zero."""
    kl_student_teacher_CT: Tensor
    """KL(student || context); row 0 is zero."""
    alpha_T: Tensor | None = None
    """How much of the nuisance is taken from the task; 0 for pair and fixed."""
    target_T: Tensor | None = None
    """d of the sampled token."""
    mean_T: Tensor | None = None
    """E_p[d]."""
    cost_T: Tensor | None = None
    """Var_p(d)."""


@dataclass(frozen=True, eq=False)
class Moments:
    """Statistics over some columns, relative to the softmaxes over them."""

    softmax: LocalStats
    """[P, T] in each field; the only part that is relative to maxima."""
    kl_2CT: Tensor
    """float64: KL(context || student) and KL(student || context); no contexts if not wanted."""
    contrast: ForwardSums | ReverseSums | None

    @property
    def max_T(self) -> Tensor:
        """[P, T] largest logits."""
        return self.softmax.max_T

    def relative_to(self, max_T: Tensor) -> Tensor:
        """[S, T] float64: what adds up over parts of the vocabulary."""
        part_3PT = self.softmax.relative_to(max_T).double()
        log_mass_PT = _log(self.softmax.sum_T) + (self.softmax.max_T - max_T)
        mass_CT, shift_CT = log_mass_PT.exp()[: self._num_compared], self._shift_CT(log_mass_PT)
        sums = () if self.contrast is None else self.contrast.rescaled(log_mass_PT).additive
        return pack(
            [
                part_3PT,
                mass_CT * (self.kl_2CT[0] + shift_CT),
                mass_CT[:1] * (self.kl_2CT[1] - shift_CT),
                *sums,
            ]
        )

    def from_parts(self, max_T: Tensor, part_ST: Tensor) -> "Moments":
        """Relative again to the softmaxes, now those over all parts."""
        softmax, contrast = self.softmax, self.contrast
        sums = () if contrast is None else contrast.additive
        part_3PT, kl_2CT, *sums = unpack(
            part_ST, [torch.stack([softmax.max_T] * 3), self.kl_2CT, *sums]
        )
        log_mass_PT = _log(part_3PT[0])
        mass_CT, shift_CT = part_3PT[0, : self._num_compared], self._shift_CT(log_mass_PT)
        if contrast is not None:
            contrast = contrast.of_additive(sums).rescaled(-log_mass_PT).settled()
        return Moments(
            softmax=softmax.from_parts(max_T, part_3PT.to(softmax.sum_T.dtype)),
            kl_2CT=kl_2CT / torch.stack([mass_CT, mass_CT[:1].expand_as(mass_CT)])
            + torch.stack([-shift_CT, shift_CT]),
            contrast=contrast,
        )

    @property
    def _num_compared(self) -> int:
        return self.kl_2CT.shape[1]

    def _shift_CT(self, log_mass_PT: Tensor) -> Tensor:
        return log_mass_PT[: self._num_compared] - log_mass_PT[0]


def concatenate(pieces: Sequence[Moments]) -> Moments:
    """The statistics of the tokens of all pieces, one after the other."""
    contrast = pieces[0].contrast
    if contrast is not None:
        sums = [piece.contrast.tensors for piece in pieces if piece.contrast is not None]
        contrast = contrast.of_tensors([torch.cat(parts, -1) for parts in zip(*sums, strict=True)])
    return Moments(
        softmax=concatenate_softmax([piece.softmax for piece in pieces]),
        kl_2CT=torch.cat([piece.kl_2CT for piece in pieces], -1),
        contrast=contrast,
    )


def with_mean(softmax: LocalStats, log_mass_T: Tensor) -> LocalStats:
    """With a place behind the contexts, for a mean whose probabilities here add up to a mass."""
    one_T = torch.ones_like(log_mass_T)
    zero_T = torch.zeros_like(log_mass_T)
    mean = (log_mass_T, one_T, zero_T, zero_T, zero_T.bool())
    return LocalStats(
        *(torch.cat([t, m[None]]) for t, m in zip(softmax.tensors, mean, strict=True))
    )


def log_mass(softmax: LocalStats) -> Tensor:
    """Log of the sum of exp(logits), float64."""
    return _log(softmax.sum_T) + softmax.max_T


def finished_stats(
    moments: Moments, contrast: Contrast | None, row_R: Tensor, num_tokens: int
) -> EvidenceStats:
    """From statistics over the whole vocabulary; of the rows that count, scattered to all rows."""
    num_contexts = moments.kl_2CT.shape[1]
    softmax = finish(moments.softmax[:num_contexts])

    def scattered(value_R: Tensor) -> Tensor:
        value_R = value_R.to(softmax.logprob_T.dtype)
        return value_R.new_zeros(*value_R.shape[:-1], num_tokens).index_copy_(-1, row_R, value_R)

    values = [softmax.logprob_T, softmax.entropy_T, *moments.kl_2CT.clamp_min(0)]
    if contrast is not None:
        values += _contrast_values(moments, contrast, softmax.logprob_T.double())
    return EvidenceStats(*map(scattered, values))


def _contrast_values(moments: Moments, contrast: Contrast, logprob_CR: Tensor) -> list[Tensor]:
    """alpha, target, mean, cost."""
    sums, num_variables = moments.contrast, contrast.num_variables()
    assert sums is not None
    alpha_R = sums.alpha_T()
    if contrast.is_mixed:
        negative_KR = logprob_CR[list(contrast.negatives)]
        mean_R = torch.logsumexp(negative_KR, 0) - math.log(len(negative_KR))
        logprob_CR = torch.cat([logprob_CR, mean_R[None]])
    return [
        alpha_R,
        sums.at_target_T(alpha_R, logprob_CR),
        sums.spread.mean_T(alpha_R, num_variables),
        sums.spread.cost_T(alpha_R, num_variables),
    ]


def _log(value: Tensor) -> Tensor:
    value = value.double()
    return value.clamp_min(torch.finfo(value.dtype).tiny).log()
