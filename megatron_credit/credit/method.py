"""What every credit method is: a closed configuration and one pure function."""

import difflib
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, ClassVar, Self

import torch
from pydantic import ValidationError
from torch import Tensor

from megatron_credit.credit.group import SIGNAL_SOURCES, Group
from megatron_credit.credit.need import EvidenceNeed, Loss
from megatron_credit.credit.result import CreditResult
from megatron_credit.settings import Settings


def nearest(name: str, known: Collection[str]) -> str:
    """A hint for an unknown name: the nearest valid one if any is near, and all of them."""
    near = difflib.get_close_matches(name.lower(), known, 1, cutoff=0.4)
    guess = f"did you mean {near[0]!r}? " if near else ""
    return f"{guess}valid: {', '.join(known)}"


class CreditMethod(Settings, ABC):
    """Hyper-parameters as fields; `credit` turns a group into advantages."""

    name: ClassVar[str]
    """What configurations and `assign` call it."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Signals that it may read besides rewards and masks, as names of `Group` fields."""
    gives: ClassVar[tuple[str, ...]] = ()
    """Fields of `CreditResult` that it fills besides the advantage and the metrics."""
    evidence: ClassVar[EvidenceNeed | None] = None
    """What its teachers are shown; None: it has none, or an external one."""
    needs_siblings: ClassVar[bool] = True
    """A group with fewer than two verdicts gets 0 without asking the method."""

    @abstractmethod
    def credit(self, group: Group) -> CreditResult:
        """The advantages of a group whose required signals are present."""

    def required(self, group: Group) -> tuple[str, ...]:
        """The signals that this very group needs; a part of `needs`."""
        return self.needs

    def reads(self, group: Group, signal: str) -> Tensor:
        """[N] bool: the rollouts whose values of a required signal make a difference.

        For those of the others 0 does as well, so nobody needs to compute them.
        """
        return torch.ones_like(group.reward_N, dtype=torch.bool)

    def losses(self) -> tuple[Loss, ...]:
        """The losses beside the surrogate that its result is meant for."""
        return ()

    def over_step(self, groups: Sequence[Group]) -> list[Group]:
        """The groups of an optimizer step, with what depends on all of them filled in."""
        return list(groups)

    @classmethod
    def configure(cls, options: dict[str, Any]) -> Self:
        """The method with these hyper-parameters; ValueError names the nearest valid one."""
        try:
            return cls.model_validate(options, strict=True)
        except ValidationError as error:
            problems = "; ".join(cls._describe(item) for item in error.errors())
            raise ValueError(f"credit method {cls.name!r}: {problems}") from None

    @classmethod
    def _describe(cls, error: Any) -> str:
        option = ".".join(str(part) for part in error["loc"]) or "options"
        if error["type"] != "extra_forbidden":
            message = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
            return f"{option} is {error['input']!r}; it {message}"
        known = [field.alias or name for name, field in cls.model_fields.items()]
        hint = nearest(option, known) if known else "it has none"
        return f"unknown option {option!r}; {hint}"

    def check_signals(self, group: Group) -> None:
        """ValueError that names the missing signal and what computes it."""
        for signal in self.required(group):
            if vars(group)[signal] is None:
                raise ValueError(
                    f"credit method {self.name!r} needs {signal}, but the group has none; it comes "
                    f"from {SIGNAL_SOURCES[signal]}"
                )
