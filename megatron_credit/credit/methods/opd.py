"""OPD, on-policy distillation: each token by how much likelier an external teacher finds it."""

from typing import ClassVar

from megatron_credit.credit.baselines import has_verdict
from megatron_credit.credit.evidence import has_evidence
from megatron_credit.credit.group import Group
from megatron_credit.credit.method import CreditMethod
from megatron_credit.credit.result import CreditResult
from megatron_credit.credit.teacher_gap import log_ratio


class Opd(CreditMethod):
    """Teacher's minus policy's log-prob; rewards say only which rollouts count."""

    name: ClassVar[str] = "opd"
    needs: ClassVar[tuple[str, ...]] = ("teacher_logprob_NT", "policy_logprob_NT")
    needs_siblings: ClassVar[bool] = False

    def credit(self, group: Group) -> CreditResult:
        """The difference in nats; 0 in rows that lack either log-prob or a verdict."""
        teacher_NT, policy_NT = group.teacher_logprob_NT, group.policy_logprob_NT
        assert teacher_NT is not None and policy_NT is not None
        valid_N = has_verdict(group.reward_N)
        evidence_N = has_evidence(group.mask_NT, teacher_NT, policy_NT)
        usable_NT = group.mask_NT & (valid_N & evidence_N)[:, None]
        return CreditResult(
            advantage_NT=log_ratio(teacher_NT, policy_NT, usable_NT),
            metrics={"credit/no_evidence_rollouts": float((valid_N & ~evidence_N).sum())},
        )
