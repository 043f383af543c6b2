"""The credit methods, by name. A new one is a file here and a line in the tuple."""

from megatron_credit.credit.method import CreditMethod
from megatron_credit.credit.methods.attempt_naive import AttemptNaive
from megatron_credit.credit.methods.cal_grpo import CalGrpo
from megatron_credit.credit.methods.cepo import Cepo
from megatron_credit.credit.methods.dapo import Dapo
from megatron_credit.credit.methods.dr_grpo import DrGrpo
from megatron_credit.credit.methods.grail import Grail
from megatron_credit.credit.methods.grpo import Grpo
from megatron_credit.credit.methods.grpo_process import GrpoProcess
from megatron_credit.credit.methods.opd import Opd
from megatron_credit.credit.methods.opsd import Opsd
from megatron_credit.credit.methods.prm_outcome import PrmOutcome
from megatron_credit.credit.methods.rlcsd import Rlcsd
from megatron_credit.credit.methods.rloo import Rloo
from megatron_credit.credit.methods.rlsd import Rlsd
from megatron_credit.credit.methods.rredcot import RredCot
from megatron_credit.credit.methods.sc_grpo import ScGrpo
from megatron_credit.credit.methods.sdpo import Sdpo
from megatron_credit.credit.methods.srpo import Srpo
from megatron_credit.credit.methods.verigate import VeriGate
from megatron_credit.credit.methods.verpo import Verpo

METHODS: dict[str, type[CreditMethod]] = {
    method.name: method
    for method in (
        Grpo,
        DrGrpo,
        Rloo,
        Dapo,
        CalGrpo,
        Grail,
        RredCot,
        VeriGate,
        Verpo,
        ScGrpo,
        Cepo,
        Rlsd,
        Rlcsd,
        Opd,
        PrmOutcome,
        GrpoProcess,
        AttemptNaive,
        Opsd,
        Sdpo,
        Srpo,
    )
}
