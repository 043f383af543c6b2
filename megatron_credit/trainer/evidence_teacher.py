"""Whose weights read the evidence of a run."""

from megatron_credit.credit import METHODS
from megatron_credit.mcore.config import TeacherConfig
from megatron_credit.trainer.config import RunConfig


def teacher_of(config: RunConfig) -> TeacherConfig:
    """As the run says, else as the method's paper does; an unknown method has none."""
    if config.evidence.teacher is not None:
        return config.evidence.teacher
    method = METHODS.get(config.credit.method)
    if method is None or method.evidence is None:
        return TeacherConfig()
    return TeacherConfig(kind=method.evidence.teacher)
