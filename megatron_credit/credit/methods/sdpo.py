"""SDPO (2601.20802): the policy learns from a slow copy of itself that saw a correct sibling."""

from typing import ClassVar

from megatron_credit.credit.methods.opsd import Opsd


class Sdpo(Opsd):
    """OPSD's rule with siblings as evidence; the divergence is the objective's."""

    name: ClassVar[str] = "sdpo"
