"""Tasks: where questions come from and how an answer is judged. Importing this stays light."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from megatron_credit.tasks.base import Task
from megatron_credit.tasks.chain_sum import ChainSum, ChainSumConfig
from megatron_credit.tasks.gym_config import GymMixConfig


def _with_kind(table: Any) -> Any:
    """Chain sums where the table does not say which task it is."""
    return {"kind": "chain_sum", **table} if isinstance(table, dict) else table


AnyTaskConfig = ChainSumConfig | GymMixConfig
TaskConfig = Annotated[AnyTaskConfig, Field(discriminator="kind"), BeforeValidator(_with_kind)]
"""A generated task, told apart by `kind`."""

__all__ = ["AnyTaskConfig", "ChainSum", "ChainSumConfig", "GymMixConfig", "Task", "TaskConfig"]
