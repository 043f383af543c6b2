"""How well a Hugging Face model does on a task's held-out prompts, sampled by transformers alone.

Shape letters: B rows of a batch, L tokens.
"""

from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from megatron_credit.batch.rollout import Prompt
from megatron_credit.rewards.answer_tags import last_answer
from megatron_credit.tasks.base import Task


class Accuracy(NamedTuple):
    """Shares of the responses that were right, and that committed to any answer."""

    right: float
    well_formed: float


def measure_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    prompts: list[Prompt],
    *,
    temperature: float,
    seed: int = 0,
    max_new_tokens: int = 70,
) -> Accuracy:
    """One response to each prompt; temperature 0 is greedy."""
    encoded = tokenizer.apply_chat_template(
        [prompt.messages for prompt in prompts],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    )
    sampling = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        response_BL = model.generate(**encoded, max_new_tokens=max_new_tokens, **sampling)
    texts = [
        tokenizer.decode(row_L, skip_special_tokens=True)
        for row_L in response_BL[:, encoded["input_ids"].shape[1] :]
    ]
    right = sum(task.grade(prompt, text) for prompt, text in zip(prompts, texts, strict=True))
    well_formed = sum(last_answer(text) is not None for text in texts)
    return Accuracy(right / len(prompts), well_formed / len(prompts))
