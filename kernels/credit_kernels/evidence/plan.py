"""What the Triton programs sum, and the statistics that their numbers stand for."""

from dataclasses import dataclass

import torch
from torch import Tensor

from credit_kernels.evidence.contrast import Contrast, Options
from credit_kernels.evidence.forward import ForwardSums
from credit_kernels.evidence.moments import Moments
from credit_kernels.evidence.reverse import ReverseSums
from credit_kernels.evidence.sums import Spread
from credit_kernels.vocab_parallel import LocalStats


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A constant of the programs, which compile anew for each; see `tile_sums`."""

    contexts: int
    contrast: bool = False
    positive: int = 0
    negative: int = 0
    free: int = 0
    """Slots of the roles."""
    negatives: tuple[int, ...] = ()
    """Contexts whose mean is the last slot; () where there is one negative, its own slot."""
    named: tuple[int, ...] = ()
    """Contexts whose most likely columns are the support; () for all columns."""
    reverse: bool = False
    complete: bool = False
    """The sums will be merged with those of other ranks, which have other softmaxes."""
    kl: bool = False
    loss: bool = False

    @classmethod
    def of(cls, options: Options, num_contexts: int, *, kl: bool, loss: bool) -> "Plan":
        """For a contrast whose numbers are those of the contexts at hand."""
        contrast = options.contrast
        if contrast is None:
            return cls(contexts=num_contexts, kl=kl)
        return cls(
            contexts=num_contexts,
            contrast=True,
            positive=contrast.positive,
            negative=num_contexts if contrast.is_mixed else contrast.negatives[0],
            free=contrast.free,
            negatives=contrast.negatives if contrast.is_mixed else (),
            named=contrast.named if options.top_k is not None else (),
            reverse=options.divergence == "reverse",
            complete=options.shard.group is not None,
            kl=kl,
            loss=loss,
        )

    @property
    def support(self) -> bool:
        """Columns are missing from the sums of the contrast."""
        return len(self.named) > 0

    @property
    def slots(self) -> int:
        """Contexts and, behind them, the mean of several negatives."""
        return self.contexts + (len(self.negatives) > 0)

    @property
    def third(self) -> bool:
        """The third variable has a mean and squares."""
        return self.complete or self.reverse

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of a row in each field of `tile_sums.Sums`."""
        return (
            self.kl * 2 * (self.contexts - 1),
            self.contrast * 1,
            self.contrast * (2 + self.third),
            self.contrast * (3 + 3 * self.third),
            self.support * 3,
            (self.loss and not self.reverse) * 3,
            self.loss * 1,
            self.reverse * 2,
        )

    @property
    def count(self) -> int:
        """Numbers of a row in all fields."""
        return sum(self.sizes)

    @property
    def softmax_at(self) -> int:
        """Place among a row's numbers, behind thresholds and the negatives' normalisers, of the
        maxima and sums of all slots; their coefficients and two more come after."""
        return len(self.named) + 2 * len(self.negatives)


def merged_splits(sums_NSR: Tensor, plan: Plan) -> Tensor:
    """[sums, R] float64 over all splits of the columns S, from those over each."""
    kl_KSR, weight_1SR, mean_XSR, square_YSR, mass_3SR, *others, centre_2SR = (
        sums_NSR.double().split(plan.sizes)
    )
    if not plan.contrast:
        return kl_KSR.sum(1)
    weight_1R = weight_1SR.sum(1).clamp_min(1e-37)
    centre_2R = (weight_1SR * centre_2SR).sum(1) / weight_1R
    if plan.reverse:
        shift_2SR = centre_2SR - centre_2R[:, None]
        mean_XSR, square_YSR = _recentred(mean_XSR, square_YSR, shift_2SR)
        if plan.support:
            mass_3SR = torch.cat([mass_3SR[:2] + shift_2SR * mass_3SR[2], mass_3SR[2:]])
    mean_XR = (weight_1SR * mean_XSR).sum(1) / weight_1R
    apart_XSR = mean_XSR - mean_XR[:, None]
    left, right = (apart_XSR[list(index)] for index in zip(*PAIRS[: len(square_YSR)], strict=True))
    square_YSR = square_YSR + weight_1SR * left * right
    summed = [part_NSR.sum(1) for part_NSR in (square_YSR, mass_3SR, *others)]
    return torch.cat([kl_KSR.sum(1), weight_1R, mean_XR, *summed, centre_2R])


PAIRS = ((0, 0), (0, 1), (1, 1), (0, 2), (1, 2), (2, 2))
"""Order of the entries of a symmetric matrix."""


def moments_of(
    softmax: LocalStats, sums_NR: Tensor, plan: Plan, contrast: Contrast | None
) -> Moments:
    """From the softmaxes of all slots over some columns, and a program's sums under them."""
    kl_KR, _, *sums = sums_NR.double().split(plan.sizes)
    kl_2CR = kl_KR.new_zeros(2, plan.contexts if plan.kl else 0, kl_KR.shape[1])
    if plan.kl:
        kl_2CR[:, 1:] = kl_KR.unflatten(0, (plan.contexts - 1, 2)).transpose(0, 1)
    return Moments(
        softmax=softmax,
        kl_2CT=kl_2CR,
        contrast=None if contrast is None else _contrast_sums(sums, plan, contrast),
    )


def _contrast_sums(
    fields: list[Tensor], plan: Plan, contrast: Contrast
) -> ForwardSums | ReverseSums:
    mean_XR, square_YR, mass_3R, cross_3R, reference_1R, centre_2R = fields
    # Where the third variable's are missing, nothing reads them.
    mean_3R = torch.cat([mean_XR, mean_XR.new_zeros(3 - len(mean_XR), mean_XR.shape[1])])
    square_6R = torch.cat([square_YR, mean_XR.new_zeros(6 - len(square_YR), mean_XR.shape[1])])
    if not plan.support:
        mass_3R = torch.zeros_like(mean_3R)
        mass_3R[2] = 1.0
    reference_R = reference_1R[0] if plan.loss else torch.zeros_like(mean_3R[0])
    map_X3 = _variables(plan, contrast).to(mean_3R.device)
    index_33 = torch.tensor([[0, 1, 3], [1, 2, 4], [3, 4, 5]], device=mean_3R.device)
    covariance_XXR = torch.einsum("xi,ijr,yj->xyr", map_X3, square_6R[index_33], map_X3)
    roles, first_XR = contrast.roles(plan.contexts), map_X3 @ mean_3R
    if not plan.reverse:
        cross_3R = cross_3R if plan.loss else torch.zeros_like(mean_3R)
        # The weight of this spread is never read.
        spread = Spread(torch.ones_like(reference_R), first_XR, covariance_XXR)
        mass_XR, cross_XR = map_X3 @ mass_3R, map_X3 @ cross_3R
        return ForwardSums(contrast, roles, spread, mass_XR, cross_XR, mass_3R[2], reference_R)
    centre_KR = centre_2R[: contrast.num_variables()]
    ratio_KR = mass_3R[: len(centre_KR)] + centre_KR * mass_3R[2]
    spread = Spread(mass_3R[2], first_XR, covariance_XXR)
    return ReverseSums(contrast, roles, spread, ratio_KR, reference_R, centre_KR).settled()


def _recentred(mean_3SR: Tensor, square_6SR: Tensor, shift_2SR: Tensor) -> tuple[Tensor, Tensor]:
    """For tangents that gain shift times p."""
    a, b = shift_2SR
    aa, ab, bb, ap, bp, pp = square_6SR
    mean_3SR = torch.cat([mean_3SR[:2] + shift_2SR * mean_3SR[2], mean_3SR[2:]])
    square_6SR = torch.stack(
        [
            aa + a * (2 * ap + a * pp),
            ab + b * ap + a * bp + a * b * pp,
            bb + b * (2 * bp + b * pp),
            ap + a * pp,
            bp + b * pp,
            pp,
        ]
    )
    return mean_3SR, square_6SR


def _variables(plan: Plan, contrast: Contrast) -> Tensor:
    """[X, 3]: the variables of the contrast's kind, from the programs' three."""
    if contrast.kind == "fec":
        rows = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    elif plan.reverse:
        rows = [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    else:
        rows = [[1.0, 0.0, 0.0], [-0.5, 1.0, 1.0]]  # the negative: nuisance + q0 - task / 2
    return torch.tensor(rows, dtype=torch.float64)
