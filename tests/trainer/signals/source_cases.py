"""A step's rollouts for the sources of signals, and passes of a policy that a test makes up."""

import math
from pathlib import Path

import torch
from transformers import AutoTokenizer

from megatron_credit.batch.rollout import Rollout, VersionSpan
from megatron_credit.batch.scored import Scored
from megatron_credit.credit import METHODS, Group
from megatron_credit.trainer.experience import pad_rows, to_sequence
from megatron_credit.trainer.signals.step import StepData

MODEL = Path(__file__).parents[3] / "models" / "chain-sum-0.6m"
QUESTION = "2 + 5 ="


def tokenizer():
    """The shipped model's."""
    return AutoTokenizer.from_pretrained(MODEL)


def ids_of(text):
    """Token ids of a text."""
    return tokenizer()(text, add_special_tokens=False)["input_ids"]


def record(sample, reward, text, *, answer="7", parsed=None, **changes):
    """A rollout with this response to the question."""
    response_ids = ids_of(text)
    fields = {
        "prompt_id": "p",
        "sample": sample,
        "prompt_ids": ids_of(f"<|user|>{QUESTION}<|assistant|>"),
        "response_ids": response_ids,
        "logprobs": [-0.5] * len(response_ids),
        "mask": [True] * len(response_ids),
        "versions": [VersionSpan(0, 0, len(response_ids))],
        "finish_reason": "stop",
        "text": text,
        "answer": answer,
        "parsed": parsed,
        "reward": math.nan if reward is None else reward,
        "messages": [{"role": "user", "content": QUESTION}],
    }
    return Rollout(**fields | changes)


def step(name, *groups, entropies=None, **options):
    """The step of a method over these groups of rollouts, as the rank that sampled knows it.

    `entropies`: of each token of each rollout.
    """
    method = METHODS[name].configure(options)
    sequences = [[to_sequence(one) for one in group] for group in groups]
    made = [
        Group(
            reward_N=torch.tensor([one.reward for one in group]),
            mask_NT=pad_rows([one.mask_T for one in own]),
            seed=number,
        )
        for number, (group, own) in enumerate(zip(groups, sequences, strict=True))
    ]
    scored = None
    if entropies is not None:
        scored = [
            [Scored(logprob_T=torch.zeros(len(row)), entropy_T=torch.tensor(row)) for row in own]
            for own in entropies
        ]
    return StepData(
        method=method,
        groups=made,
        wanted=[frozenset(method.required(group)) for group in made],
        sequences=sequences,
        records=[list(group) for group in groups],
        scored=scored,
    )
