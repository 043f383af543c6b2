"""Tasks: where questions come from and how an answer is judged. Importing this stays light."""

from typing import Annotated

from pydantic import Field

from megatron_credit.tasks.base import Task
from megatron_credit.tasks.chain_sum import ChainSum, ChainSumConfig

# With a second task this becomes a union: ChainSumConfig | OtherConfig, told apart by `kind`.
TaskConfig = Annotated[ChainSumConfig, Field()]

__all__ = ["ChainSum", "ChainSumConfig", "Task", "TaskConfig"]
