"""The task of a run: generated questions, or those of the user's own files."""

from transformers import PreTrainedTokenizerBase

from megatron_credit.data.config import DataConfig
from megatron_credit.tasks import AnyTaskConfig
from megatron_credit.tasks.base import Task
from megatron_credit.tasks.chain_sum import ChainSum, ChainSumConfig


def build_task(
    task: AnyTaskConfig | None,
    data: DataConfig | None,
    *,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
) -> Task:
    """The task that is configured, one of the two; ValueError where it cannot be used.

    `seed` decides the order of the files' prompts.
    """
    if isinstance(task, ChainSumConfig):
        return ChainSum(task)
    if task is not None:
        from megatron_credit.tasks.gym_mix import GymMix

        return GymMix(task)
    # Pyarrow and pandas come with it: only for who reads files.
    from megatron_credit.tasks.dataset import DatasetTask

    assert data is not None
    return DatasetTask(data, tokenizer=tokenizer, seed=seed)
