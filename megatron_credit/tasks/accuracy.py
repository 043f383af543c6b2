"""How well a shipped model does on a task's prompts."""

from typing import NamedTuple

from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

from megatron_credit.batch.rollout import Prompt
from megatron_credit.tasks.base import Task
from megatron_credit.tasks.sample import sample_responses, write_chat


class Accuracy(NamedTuple):
    """Shares of the responses that were right, and that hold any answer in the form asked for."""

    right: float
    well_formed: float


def measure_accuracy(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    prompts: list[Prompt],
    *,
    temperature: float,
    seed: int = 0,
    max_new_tokens: int = 70,
) -> Accuracy:
    """One response to each prompt; temperature 0 is greedy."""
    responses = sample_responses(
        model,
        tokenizer,
        [write_chat(tokenizer, prompt.messages) for prompt in prompts],
        temperature=temperature,
        seed=seed,
        max_new_tokens=max_new_tokens,
    )
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    verdicts = task.grade(list(zip(prompts, texts, strict=True)))
    right = sum(verdict.outcome == "right" for verdict in verdicts)
    well_formed = sum(verdict.outcome != "unparsed" for verdict in verdicts)
    return Accuracy(right / len(prompts), well_formed / len(prompts))
