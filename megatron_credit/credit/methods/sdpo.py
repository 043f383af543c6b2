"""SDPO (2601.20802): the policy learns from a slow copy of itself that saw a correct sibling."""

from typing import ClassVar

from megatron_credit.credit.methods.opsd import Opsd
from megatron_credit.credit.need import EvidenceNeed


class Sdpo(Opsd):
    """OPSD's rule with siblings as evidence; the divergence is the objective's."""

    name: ClassVar[str] = "sdpo"
    evidence: ClassVar[EvidenceNeed | None] = EvidenceNeed(
        positive="sibling", teacher="ema", top_k=100
    )
