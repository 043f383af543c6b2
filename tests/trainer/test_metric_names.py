"""Every metric that a credit method gives is documented."""

import math

import pytest
from credit.full_groups import full_group

from megatron_credit.credit import METHODS, assign
from megatron_credit.trainer.metric_names import is_known

GROUPS = ([1.0, 0.0, 1.0, 0.0, math.nan], [0.0] * 4, [1.0] * 4, [1.0])


@pytest.mark.parametrize("name", METHODS)
def test_metrics_of_a_method_are_in_the_table(name):
    given = {metric for rewards in GROUPS for metric in assign(name, full_group(rewards)).metrics}
    assert [metric for metric in sorted(given) if not is_known(metric)] == []


def test_a_name_that_nobody_explains_is_unknown():
    assert is_known("eval/accuracy/my.dataset")
    assert not is_known("eval/accuracy_x")
