"""The contexts as the Triton backends take them: R counts the rows that are not ignored."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from credit_kernels.evidence.contrast import Contrast, Options
from credit_kernels.evidence.moments import Moments, log_mass, with_mean
from credit_kernels.evidence.plan import Plan, moments_of
from credit_kernels.logprob.operands import Operands
from credit_kernels.vocab_parallel import LOWEST, LocalStats


@dataclass(frozen=True, eq=False)
class Contexts:
    """Rows of the contexts that are read, the student first, in the inputs' type."""

    hidden_CRH: Tensor
    weight_VH: Tensor
    teacher_weight_VH: Tensor | None
    """Output weight of all contexts but the first; None: the same."""
    target_R: Tensor
    options: Options
    """The contrast's numbers are those of the contexts here."""
    number_NR: Tensor
    """What the programs need beforehand: thresholds, and maxima and log sums of the negatives."""

    @classmethod
    def of(
        cls,
        hidden_CTH: Tensor,
        weight_VH: Tensor,
        teacher_weight_VH: Tensor | None,
        target_T: Tensor,
        options: Options,
        chosen: tuple[int, ...],
    ) -> tuple["Contexts", Tensor]:
        """Some contexts of the rows that count, and the numbers of those rows among all tokens."""
        row_R = ((target_T >= 0) & (target_T < options.shard.total)).nonzero()[:, 0]
        hidden_CRH = hidden_CTH if len(chosen) == len(hidden_CTH) else hidden_CTH[list(chosen)]
        if len(row_R) < len(target_T):
            hidden_CRH = hidden_CRH[:, row_R]
        if options.contrast is not None:
            options = replace(options, contrast=_renumbered(options.contrast, chosen))
        contexts = cls(
            hidden_CRH=hidden_CRH,
            weight_VH=weight_VH,
            teacher_weight_VH=teacher_weight_VH,
            target_R=target_T[row_R],
            options=options,
            number_NR=hidden_CTH.new_empty(0, len(row_R), dtype=torch.float32),
        )
        return contexts, row_R

    def head(self, context: int) -> Operands:
        """The output head of one context."""
        weight_VH = self.weight_VH
        if context > 0 and self.teacher_weight_VH is not None:
            weight_VH = self.teacher_weight_VH
        return Operands(
            hidden_RH=self.hidden_CRH[context],
            weight_VH=weight_VH,
            num_columns=self.options.shard.num_columns,
            start=self.options.shard.start,
            temperature=self.options.temperature,
            softcap=self.options.softcap,
        )

    @property
    def column_R(self) -> Tensor:
        """int32 row of the weight of each target, -1 where another rank has it."""
        return self.head(0).target_column(self.target_R)

    def __getitem__(self, rows: slice) -> "Contexts":
        """Some of the rows."""
        return replace(
            self,
            hidden_CRH=self.hidden_CRH[:, rows],
            target_R=self.target_R[rows],
            number_NR=self.number_NR[:, rows].contiguous(),
        )

    def with_numbers(self, *number_NR: Tensor) -> "Contexts":
        """With more numbers behind those of each row."""
        return replace(self, number_NR=torch.cat([self.number_NR, *number_NR]))

    def no_softmaxes(self) -> LocalStats:
        """[C, R] over no column yet, for a kernel to write to."""
        shape = (len(self.hidden_CRH), len(self.target_R))
        max_CR = self.number_NR.new_full(shape, LOWEST)
        sum_CR, moment_CR, logit_CR = self.number_NR.new_zeros(3, *shape)
        owned_CR = (self.column_R >= 0).expand(shape)
        return LocalStats(max_CR, sum_CR, moment_CR, logit_CR, owned_CR)

    def no_moments(self, plan: Plan) -> Moments:
        """Over no column."""
        _, softmax = self.with_softmaxes(self.no_softmaxes())
        sums_NR = self.number_NR.new_zeros(plan.count, len(self.target_R))
        return moments_of(softmax, sums_NR, plan, self.options.contrast)

    def with_softmaxes(self, softmax: LocalStats) -> tuple["Contexts", LocalStats]:
        """With the softmaxes of all slots among the numbers, from those of the contexts here."""
        contrast = self.options.contrast
        if contrast is not None and contrast.is_mixed:
            negatives = list(contrast.negatives)
            count = len(negatives)
            max_KR, log_sum_KR = self.number_NR[-2 * count :].split(count)
            log_share_KR = log_mass(softmax)[negatives] - max_KR.double() - log_sum_KR.double()
            log_mass_R = log_share_KR.logsumexp(0) - math.log(count)
            softmax = with_mean(softmax, log_mass_R.clamp_min(LOWEST).float())
        return self.with_numbers(softmax.max_T, softmax.sum_T), softmax


def chosen_for_loss(contrast: Contrast) -> tuple[int, ...]:
    """The contexts that a loss reads."""
    return tuple(sorted({0, *contrast.named}))


def _renumbered(contrast: Contrast, chosen: tuple[int, ...]) -> Contrast:
    place = {context: index for index, context in enumerate(chosen)}
    return replace(
        contrast,
        positive=place[contrast.positive],
        negatives=tuple(place[context] for context in contrast.negatives),
        free=place[contrast.free],
    )
