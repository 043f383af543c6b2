"""The one entry: a method's name and a group in, advantages out."""

from dataclasses import replace
from typing import Any

import torch

from megatron_credit.credit.baselines import has_verdict
from megatron_credit.credit.group import Group
from megatron_credit.credit.method import nearest
from megatron_credit.credit.methods import METHODS
from megatron_credit.credit.result import EXTRAS, CreditResult, no_credit

_LARGEST = torch.finfo(torch.float32).max


@torch.no_grad()
def assign(name: str, group: Group, **hyper: Any) -> CreditResult:
    """The advantage of each token of the group under the named method.

    Raises ValueError: unknown method or hyper-parameter (with the nearest valid name), a value that
    the method does not accept, a signal that the method needs and the group lacks. No gradient
    flows through the result, and the group's tensors are not written to.
    """
    if name not in METHODS:
        raise ValueError(f"unknown credit method {name!r}; {nearest(name, METHODS)}")
    method = METHODS[name].configure(hyper)
    num_valid = int(has_verdict(group.reward_N).sum())
    counts = {
        "group/invalid_rewards": float(len(group.reward_N) - num_valid),
        "group/singleton": float(num_valid < 2),
    }
    if num_valid < 2 and method.needs_siblings:
        return no_credit(group.mask_NT, counts, method.gives)
    method.check_signals(group)
    result = method.credit(group)
    # A value outside the mask may be NaN, so it is replaced, not multiplied by 0.
    advantage_NT = torch.where(group.mask_NT, result.advantage_NT, 0.0)
    # An advantage of finite rewards stays finite, even of rewards near the end of float32.
    advantage_NT = advantage_NT.clamp(-_LARGEST, _LARGEST).float()
    extras = {name: vars(result)[name].to(EXTRAS[name]) for name in method.gives}
    return replace(result, advantage_NT=advantage_NT, metrics=result.metrics | counts, **extras)
