"""Sampling and scoring with transformers alone, for the figures on the model cards.

Shape letters: B rows of a batch, L tokens of a row, T tokens of a response, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import log_softmax
from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

BATCH_ROWS = 256


def write_chat(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    """The text of a chat up to the opening of the assistant's turn."""
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def sample_responses(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    chats: list[str],
    *,
    temperature: float,
    seed: int = 0,
    max_new_tokens: int = 70,
) -> list[list[int]]:
    """Token ids of one response to each chat, without end token; temperature 0 is greedy."""
    sampling = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    responses = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for start in range(0, len(chats), BATCH_ROWS):
            encoded = tokenizer(
                chats[start : start + BATCH_ROWS],
                add_special_tokens=False,
                padding=True,
                return_tensors="pt",
            )
            # transformers types `self` of generate with a protocol that its models do not meet
            ids_BL = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
                **encoded, max_new_tokens=max_new_tokens, **sampling
            )
            responses += ids_BL[:, encoded["input_ids"].shape[1] :].tolist()
    return [_before_end(ids, tokenizer) for ids in responses]


@torch.no_grad()
def logprobs(
    model: Qwen3ForCausalLM, contexts: Sequence[list[int]], responses: Sequence[list[int]]
) -> list[Tensor]:
    """logprob_TV of each response behind its context: row t is the prediction of token t."""
    found: list[Tensor] = []
    for start in range(0, len(responses), BATCH_ROWS):
        pairs = list(
            zip(
                contexts[start : start + BATCH_ROWS],
                responses[start : start + BATCH_ROWS],
                strict=True,
            )
        )
        length = max(len(context) + len(response) for context, response in pairs)
        # Padding is on the right, so causality hides it, whatever it is.
        ids_BL = torch.zeros(len(pairs), length, dtype=torch.long)
        for row, (context, response) in enumerate(pairs):
            ids_BL[row, : len(context) + len(response)] = torch.tensor(context + response)
        hidden_BLH = model.model(input_ids=ids_BL, use_cache=False).last_hidden_state
        for row, (context, response) in enumerate(pairs):
            first = len(context) - 1
            logits_TV = model.lm_head(hidden_BLH[row, first : first + len(response)])
            found.append(log_softmax(logits_TV, dim=-1))
    return found


def _before_end(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    ends = (tokenizer.eos_token_id, tokenizer.pad_token_id)
    return ids[: next((place for place, token in enumerate(ids) if token in ends), len(ids))]
