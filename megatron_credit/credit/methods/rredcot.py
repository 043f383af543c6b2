"""RREDCoT (2606.06475): the reward redistributed over the segments of the chain of thought.

No full text or code is public: the rules are derived from the abstract and checked by enumeration.
"""

from typing import ClassVar, Literal

import torch
from pydantic import ConfigDict, Field
from torch import Tensor

from megatron_credit.credit.baselines import (
    STD_FLOOR,
    Base,
    has_verdict,
    is_verified,
    sequence_advantage,
    spread,
)
from megatron_credit.credit.columns import on_tokens
from megatron_credit.credit.group import Group
from megatron_credit.credit.method import CreditMethod
from megatron_credit.credit.result import CreditResult
from megatron_credit.credit.state_values import Probes, Values, read_probes, state_values
from megatron_credit.credit.summary import mean

_STD_MIN = 1e-8
"""Below this the shares of a group count as equal."""


class RredCot(CreditMethod):
    """Each segment gets the change in the chance of a right answer that it brings about."""

    # The option is called `credit`, which as an attribute is the method's own function.
    model_config = ConfigDict(
        validate_by_alias=True, validate_by_name=True, serialize_by_alias=True
    )
    name: ClassVar[str] = "rredcot"
    needs: ClassVar[tuple[str, ...]] = (
        "segment_id_NT",
        "answer_logprob_NMY",
        "utility_Y",
        "answer_index_N",
    )
    values: Values = "pooled"
    """Value of a state. pooled: mean over the group's answers of verdict times likelihood, relative
    to the likelihood after whole chains; own: the rollout's reward times the likelihood of its own
    answer, relative to that after its whole chain; enumerated: the summed probability of the
    distinct right answers."""
    credit_rule: Literal["td", "togo", "group", "mix"] = Field("td", alias="credit")
    """td: change of value over the group's standard deviation; group: the same, centred first;
    togo: reward minus the value before the segment; mix: the baseline's advantage plus beta times
    the change."""
    base: Base = "grpo"
    """The group baseline of `mix`."""
    beta: float = Field(1.0, ge=0)
    """Weight of the change of value in `mix`."""
    train_all_correct: bool = False
    """Also train on groups of equal rewards, if verified."""

    def required(self, group: Group) -> tuple[str, ...]:
        """Nothing where the group gets 0 for its rewards; verdicts of answers unless `own`."""
        if not self._trains(group.reward_N):
            return ()
        unread = {"utility_Y"} if self.values == "own" else set[str]()
        return tuple(signal for signal in self.needs if signal not in unread)

    def credit(self, group: Group) -> CreditResult:
        """The share of each segment on its tokens, what the chain left over on the answer's."""
        if not self._trains(group.reward_N):
            zero_NT = torch.zeros_like(group.mask_NT, dtype=torch.float64)
            return CreditResult(advantage_NT=zero_NT, metrics={})
        probes = read_probes(group)
        value_NP = state_values(group, probes, self.values)
        # Without a verdict the reward may be NaN.
        reward_N1 = group.reward_N.double().where(probes.probed_N, 0.0)[:, None]
        before_NP = torch.cat([value_NP[:, :-1], probes.at_last(value_NP)], dim=1)
        after_NP = torch.cat([value_NP[:, 1:], reward_N1], dim=1)
        change_NP = after_NP - before_NP
        share_NP = self._share(change_NP, reward_N1 - before_NP, probes.earning_NP)
        advantage_NT = on_tokens(share_NP, probes.column_NT)
        if self.credit_rule == "mix":
            advantage_NT += spread(sequence_advantage(self.base, group.reward_N), group.mask_NT)
        return CreditResult(
            advantage_NT=advantage_NT.where(probes.probed_N[:, None], 0.0),
            metrics=_metrics(group, probes, value_NP, change_NP),
        )

    def _trains(self, reward_N: Tensor) -> bool:
        """The valid rewards differ, or are equal, verified and wanted."""
        reward_R = reward_N[has_verdict(reward_N)]
        if len(reward_R) < 2:
            return False
        wanted = self.train_all_correct and bool(is_verified(reward_R).all())
        return wanted or bool(reward_R.max() > reward_R.min())

    def _share(self, change_NP: Tensor, to_go_NP: Tensor, earning_NP: Tensor) -> Tensor:
        """[N, P] float64: what the tokens of each segment get, in the last column the answer's."""
        if self.credit_rule == "togo":
            return to_go_NP
        if self.credit_rule == "mix":
            return self.beta * change_NP
        change_J = change_NP[earning_NP]
        std = float(change_J.std()) if len(change_J) > 1 else 0.0
        if std < _STD_MIN:
            return torch.zeros_like(change_NP)
        centre = mean(change_J) if self.credit_rule == "group" else 0.0
        return (change_NP - centre) / (std + STD_FLOOR)


def _metrics(
    group: Group, probes: Probes, value_NP: Tensor, change_NP: Tensor
) -> dict[str, float]:
    valid_N, probed_N = has_verdict(group.reward_N), probes.probed_N
    return {
        "credit/value_start": mean(value_NP[probed_N, 0]),
        "credit/value_end": mean(probes.at_last(value_NP)[probed_N]),
        "credit/closing_abs": mean(change_NP[probes.earning_NP[:, -1], -1].abs()),
        "credit/segments": mean(probes.last_N1[probed_N]),
        "credit/unprobed_rollouts": float((valid_N & ~probed_N).sum()),
        "credit/unparsed_rollouts": float((valid_N & (probes.answer_N < 0)).sum()),
    }
