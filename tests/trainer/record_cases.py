"""Rollouts to make records of."""

from megatron_credit.batch.rollout import Rollout, VersionSpan


def rollout(prompt="a", sample=0, **changes):
    """Two tokens in answer to three."""
    fields = {
        "prompt_id": prompt,
        "sample": sample,
        "prompt_ids": [5, 6, 7],
        "response_ids": [8, 9],
        "logprobs": [-0.5, -0.25],
        "mask": [True, True],
        "versions": [VersionSpan(0, 0, 2)],
        "finish_reason": "stop",
        "text": "x",
        "answer": "1",
        "reward": float(sample % 2),
        "outcome": "right" if sample % 2 else "wrong",
    }
    return Rollout(**fields | changes)


def step(*prompts, size=2):
    """A group of this size for each prompt."""
    return [rollout(prompt, sample) for prompt in prompts for sample in range(size)]
