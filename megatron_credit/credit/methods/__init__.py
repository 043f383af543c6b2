"""The credit methods, by name. A new one is a file here and a line in the tuple."""

from megatron_credit.credit.method import CreditMethod
from megatron_credit.credit.methods.dapo import Dapo
from megatron_credit.credit.methods.dr_grpo import DrGrpo
from megatron_credit.credit.methods.grpo import Grpo
from megatron_credit.credit.methods.rloo import Rloo

METHODS: dict[str, type[CreditMethod]] = {
    method.name: method for method in (Grpo, DrGrpo, Rloo, Dapo)
}
