"""DAPO (2503.14476): GRPO's advantage; what is new happens before it and in the clipping."""

from typing import ClassVar

from megatron_credit.credit.methods.grpo import Grpo


class Dapo(Grpo):
    """GRPO on groups that the sampler has already filtered; the clip range is the objective's."""

    name: ClassVar[str] = "dapo"
