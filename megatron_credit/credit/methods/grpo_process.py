"""Process-supervised GRPO (2402.03300): normalised step rewards, summed over what follows."""

from typing import ClassVar

from megatron_credit.credit.columns import on_tokens
from megatron_credit.credit.group import Group
from megatron_credit.credit.method import CreditMethod
from megatron_credit.credit.result import CreditResult
from megatron_credit.credit.steps import future_sum, read_steps, standardised


class GrpoProcess(CreditMethod):
    """The scores of the steps from each one on; the verifier says only which rollouts count."""

    name: ClassVar[str] = "grpo_process"
    needs: ClassVar[tuple[str, ...]] = ("step_id_NT", "step_score_NS")

    def credit(self, group: Group) -> CreditResult:
        """The future sum of the standardised scores; 0 for a group on which the PRM failed."""
        steps = read_steps(group)
        future_NS = future_sum(standardised(steps.score_NS, steps.present_NS))
        return CreditResult(
            advantage_NT=on_tokens(future_NS, steps.id_NT),
            metrics={"credit/prm_failed": float(steps.unscored_N.any())},
        )
