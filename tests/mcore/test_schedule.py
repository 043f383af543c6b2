"""The learning rate of known steps."""

import pytest

from megatron_credit.mcore.config import OptimizerConfig
from megatron_credit.mcore.schedule import learning_rate


def rates(steps, **options):
    config = OptimizerConfig(lr=1.0, **options)
    return [learning_rate(config, step) for step in steps]


def test_constant():
    assert rates([0, 1, 1000]) == [1.0, 1.0, 1.0]


def test_warm_up_wastes_no_step():
    assert rates([0, 1, 2, 3, 4, 5], warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear():
    found = rates([0, 1, 2, 4, 6, 9], warmup_steps=2, schedule="linear", decay_steps=6, min_lr=0.2)
    assert found == pytest.approx([0.5, 1.0, 1.0, 0.6, 0.2, 0.2])


def test_cosine():
    found = rates([0, 1, 2, 3, 4, 9], schedule="cosine", decay_steps=4)
    assert found == pytest.approx([1.0, 0.8535533905932737, 0.5, 0.14644660940672627, 0.0, 0.0])
