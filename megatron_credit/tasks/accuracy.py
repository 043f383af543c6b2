"""How well the shipped model does on a task's prompts, sampled by transformers alone.

Shape letters: B rows of a batch, L tokens.
"""

from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

from megatron_credit.batch.rollout import Prompt
from megatron_credit.rewards.answer_tags import last_answer
from megatron_credit.tasks.base import Task


class Accuracy(NamedTuple):
    """Shares of the responses that were right, and that committed to any answer."""

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
    chats = [
        str(
            tokenizer.apply_chat_template(
                prompt.messages, add_generation_prompt=True, tokenize=False
            )
        )
        for prompt in prompts
    ]
    encoded = tokenizer(chats, add_special_tokens=False, padding=True, return_tensors="pt")
    sampling = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # transformers types `self` of generate with a protocol that its models do not meet
        response_BL = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
            **encoded, max_new_tokens=max_new_tokens, **sampling
        )
    num_context = encoded["input_ids"].shape[1]
    texts = tokenizer.batch_decode(response_BL[:, num_context:], skip_special_tokens=True)
    verdicts = task.grade(list(zip(prompts, texts, strict=True)))
    right = sum(verdict.outcome == "right" for verdict in verdicts)
    well_formed = sum(last_answer(text) is not None for text in texts)
    return Accuracy(right / len(prompts), well_formed / len(prompts))
