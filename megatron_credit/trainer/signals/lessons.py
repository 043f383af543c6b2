"""What the policy learns from its views beside the surrogate: the method's losses with their masks.

Shape letters: N rollouts of a group, T response tokens.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from megatron_credit.batch.teaching import (
    DistillationTeaching,
    EvidenceTeaching,
    Teaching,
    TokenLoss,
)
from megatron_credit.batch.views import Views
from megatron_credit.credit import CreditResult
from megatron_credit.credit.need import EvidenceNeed, Loss
from megatron_credit.trainer.signals.config import EvidenceSection
from megatron_credit.trainer.signals.evidence_passes import Slots


class ViewLessons:
    """Losses between rollouts and their evidence."""

    def __init__(
        self,
        losses: tuple[Loss, ...],
        need: EvidenceNeed,
        section: EvidenceSection,
        slots: Slots,
    ) -> None:
        self._losses, self._need, self._section, self._slots = losses, need, section, slots

    def teaching(self, views: Sequence[Views], results: Sequence[CreditResult]) -> Teaching | None:
        """The losses over these rollouts, whose groups got these results."""
        section = self._section
        if "distillation" in self._losses:
            mask = _rows(views, results, lambda result: result.distillation_mask_NT)
            return DistillationTeaching(
                views=views,
                losses=(TokenLoss(name="distillation", coefficient=1.0, mask=mask),),
                beta=section.beta,
                top_k=section.top_k or self._need.top_k,
            )
        losses = []
        if "reference" in self._losses and self._slots.free:
            # The policy itself is its own evidence-free teacher, and nothing draws it there.
            losses.append(
                TokenLoss(
                    name="reference",
                    coefficient=section.lambda_ref,
                    mask=[one.plain.mask_T for one in views],
                )
            )
        if "evidence" in self._losses:
            mask = _rows(views, results, lambda result: result.evidence_mask_NT)
            losses.append(TokenLoss(name="evidence", coefficient=section.lambda_evi, mask=mask))
        if not losses:
            return None
        return EvidenceTeaching(
            views=views,
            losses=tuple(losses),
            controller=_rows(views, results, lambda result: result.evidence_weight_NT),
            contrast=self._slots.contrast(section.contrast),
            divergence=section.divergence,
            top_k=section.top_k,
        )


def _rows(
    views: Sequence[Views],
    results: Sequence[CreditResult],
    field: Callable[[CreditResult], Tensor | None],
) -> list[Tensor]:
    """A field of the results, rollout by rollout, without the padding."""
    rows = [row_T for result in results for row_T in _given(field(result))]
    return [row_T[: one.plain.num_response] for one, row_T in zip(views, rows, strict=True)]


def _given(field_NT: Tensor | None) -> Tensor:
    assert field_NT is not None
    return field_NT
