"""A function of the user as process reward model."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from megatron_credit.rewards.custom import load_function
from megatron_credit.rewards.prm.config import CallablePrm
from megatron_credit.rewards.prm.steps import StepItem, read_scores


class FunctionScorer:
    """Calls function(prompt, steps), with metadata=.. where it has such a parameter."""

    def __init__(self, config: CallablePrm) -> None:
        """Imports the function; ValueError when it is not there or takes something else."""
        self._function = load_function(config.function, "PRM function")
        self._takes_metadata = takes_metadata(self._function, config.function)

    def score(self, items: Sequence[StepItem]) -> list[list[float] | str]:
        """Scores of each item; ValueError where the function returns something else."""
        return [read_scores(self._call(item), len(item.steps)) for item in items]

    def _call(self, item: StepItem) -> Any:
        steps = list(item.steps)
        if self._takes_metadata:
            return self._function(item.prompt, steps, metadata=item.metadata)
        return self._function(item.prompt, steps)


def takes_metadata(function: Callable[..., Any], path: str) -> bool:
    """Whether the function has a parameter called metadata; ValueError where it takes others."""
    try:
        signature = inspect.signature(function)
        metadata = {"metadata": {}} if "metadata" in signature.parameters else {}
        signature.bind("", [], **metadata)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path} must take (prompt, steps) or (prompt, steps, metadata): {error}"
        ) from None
    return bool(metadata)
