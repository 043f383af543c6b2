"""Credit: one prompt group with its signals in, one advantage for each token out. Pure.

Shape letters: N rollouts of a group, R of them with a verdict, T response tokens, K attempts (in
`evidence` wrong siblings), S steps, M segments, P = M + 1 states between segments, Y answers.
"""

from megatron_credit.credit.assign import assign
from megatron_credit.credit.group import Group
from megatron_credit.credit.methods import METHODS
from megatron_credit.credit.result import CreditResult

__all__ = ["METHODS", "CreditResult", "Group", "assign"]
