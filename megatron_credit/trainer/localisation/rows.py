"""The rows of the table: what is configured for each, or why a method has none."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from megatron_credit.credit import METHODS, Group
from megatron_credit.credit.method import CreditMethod, nearest
from megatron_credit.mcore.config import TeacherConfig
from megatron_credit.rewards.prm.config import CallablePrm
from megatron_credit.trainer.check_credit import check_credit, evidence_keys, reads
from megatron_credit.trainer.config import CreditSection, RunConfig
from megatron_credit.trainer.evidence_teacher import teacher_of
from megatron_credit.trainer.localisation.culprits import SEPARATOR, Groups
from megatron_credit.trainer.signals.attempts import AttemptSource
from megatron_credit.trainer.signals.config import (
    EvidenceSection,
    ProbesSection,
    SaliencySection,
)
from megatron_credit.trainer.signals.probes import ProbeSource
from megatron_credit.trainer.signals.saliency import SaliencySource
from megatron_credit.trainer.signals.steps import StepSource

Form = Literal["tags", "boxed"]
"""How answers stand in the responses."""
Quantity = Literal["advantages", "evidence_weight"]
ORACLE = CallablePrm(
    function="megatron_credit.tasks.chain_sum_steps:score_steps", step_separator=SEPARATOR
)


@dataclass(frozen=True)
class Variant:
    """One way to look at a method."""

    label: str
    options: dict[str, Any] = field(default_factory=dict)
    quantity: Quantity = "advantages"


VARIANTS = {
    "verpo": (
        Variant("verpo (advantage mode)", {"mode": "advantage"}),
        Variant("verpo w", quantity="evidence_weight"),
    )
}
"""Of methods whose advantage is not all of their credit."""


@dataclass(frozen=True)
class Row:
    """A line of the table, before anything is measured."""

    label: str
    config: RunConfig
    form: Form
    groups: Groups
    quantity: Quantity

    @property
    def name(self) -> str:
        """The label as a file may be called."""
        return self.label.replace(" (", "-").replace(")", "").replace(" ", "-")

    @property
    def method(self) -> CreditMethod:
        """With its options."""
        return METHODS[self.config.credit.method].configure(self.config.credit.options)


@dataclass(frozen=True)
class Refusal:
    """A method that has no row."""

    method: str
    reason: str


def plan_rows(
    config: RunConfig, methods: Sequence[str] | None, *, has_average: bool
) -> tuple[list[Row], list[Refusal]]:
    """The rows of these methods, by default all, and why others have none.

    `has_average`: there is a moving average of the policy, or the policy is at its start.
    ValueError for a method that does not exist, or where no row is left.
    """
    rows, refused = [], []
    for name in methods or METHODS:
        if name not in METHODS:
            raise ValueError(f"unknown method {name!r}; {nearest(name, METHODS)}")
        try:
            for variant in VARIANTS.get(name, (Variant(name),)):
                rows.append(row_of(config, name, variant, has_average=has_average))
        except ValueError as error:
            refused.append(Refusal(name, str(error)))
    if not rows:
        raise ValueError(
            "no method is left to measure: " + "; ".join(one.reason for one in refused)
        )
    return rows, refused


def row_of(config: RunConfig, name: str, variant: Variant, *, has_average: bool) -> Row:
    """The row; ValueError where the method gives no credit that could be looked at."""
    given = config.credit.options if config.credit.method == name else {}
    section = CreditSection(method=name, options=given | variant.options)
    method = METHODS[name].configure(section.options)
    if reads(method, AttemptSource.signals):
        raise ValueError("gives credit to whole attempts, and each response here is one")
    if "distillation" in method.losses():
        raise ValueError("what it says of wrong responses is a distillation loss, no advantage")
    form: Form = "boxed" if reads(method, READ_BOXES) else "tags"
    own = as_read(config, section, method, form)
    check_credit(own)
    if teacher_of(own).kind == "ema" and not has_average:
        raise ValueError(
            "is read by a moving average of the policy, which this checkpoint does not hold; set "
            "evidence.teacher.kind to current or frozen"
        )
    return Row(variant.label, own, form, groups_of(method), variant.quantity)


READ_BOXES = (*SaliencySource.signals, *ProbeSource.signals)


def as_read(
    config: RunConfig, section: CreditSection, method: CreditMethod, form: Form
) -> RunConfig:
    """The configuration with this method, without what it does not read."""
    assert config.task is not None
    own = config.model_copy(update={"credit": section})
    keys = evidence_keys(method, reads_itself=teacher_of(own).kind == "current")
    weighs, probed = reads(method, SaliencySource.signals), reads(method, ProbeSource.signals)
    scored = reads(method, StepSource.signals)
    return own.model_copy(
        update={
            "task": config.task.model_copy(update={"answer_format": form}),
            "evidence": EvidenceSection.model_validate(config.evidence.model_dump(include=keys)),
            "saliency": config.saliency if weighs else SaliencySection(),
            "probes": config.probes if probed else ProbesSection(),
            "prm": (config.prm or ORACLE) if scored else None,
        }
    )


def with_reference(config: RunConfig, model: Any) -> RunConfig:
    """The configuration whose teachers have the weights of this directory."""
    teacher = TeacherConfig(kind="frozen", model=model)
    evidence = config.evidence.model_copy(update={"teacher": teacher})
    return config.model_copy(update={"evidence": evidence})


def groups_of(method: CreditMethod) -> Groups:
    """Where the method says something of its own: in mixed groups, unless it asks nothing there."""
    mixed = Group(
        reward_N=torch.tensor([1.0, 1.0, 0.0, 0.0]), mask_NT=torch.ones(4, 1, dtype=torch.bool)
    )
    return "all_wrong" if method.needs and not method.required(mixed) else "mixed"
