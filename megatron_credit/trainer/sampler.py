"""Rank 0's side of the rollout phase: prompts in, graded rollouts out."""

import hashlib
import math
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from megatron_credit.batch.rollout import Completion, Prompt, Rollout
from megatron_credit.rollouts.client import EngineClient, GenerateRequest
from megatron_credit.rollouts.config import SamplingConfig
from megatron_credit.tasks.base import Task


class Sampler:
    """Samples groups of rollouts from the engine and grades them.

    Every choice follows from (seed, step, prompt), never from what was drawn before, so a resumed
    run draws what an uninterrupted one would have drawn.
    """

    def __init__(
        self,
        *,
        task: Task,
        tokenizer: PreTrainedTokenizerBase,
        engine: EngineClient,
        sampling: SamplingConfig,
        seed: int,
    ) -> None:
        self._task = task
        self._tokenizer = tokenizer
        self._engine = engine
        self._sampling = sampling
        self._seed = seed
        self._stop = sampling.stop_token_ids or (tokenizer.eos_token_id,)

    def train_groups(self, step: int, *, num_prompts: int, num_samples: int) -> list[list[Rollout]]:
        """The groups of one step (from 1): prompts follow each other in the task's order."""
        first = (step - 1) * num_prompts
        prompts = [self._task.train_prompt(first + offset) for offset in range(num_prompts)]
        return self._groups(prompts, num_samples, self._sampling.temperature, f"train-{step}")

    def accuracy(self, *, temperature: float) -> float:
        """Share of held-out prompts answered rightly by one sample each; temperature 0 is greedy.

        The seeds are the same in every evaluation, so that two of them differ by the weights alone.
        """
        groups = self._groups(self._task.eval_prompts(), 1, temperature, "eval")
        return sum(group[0].reward == 1.0 for group in groups) / len(groups)

    def probe(self, step: int) -> Rollout:
        """One rollout of a held-out prompt, to compare engine and trainer log-probs on."""
        prompt = self._task.eval_prompts()[:1]
        return self._groups(prompt, 1, self._sampling.temperature, f"probe-{step}")[0][0]

    def _groups(
        self, prompts: Sequence[Prompt], num_samples: int, temperature: float, purpose: str
    ) -> list[list[Rollout]]:
        prompt_ids = [encode_prompt(self._tokenizer, prompt) for prompt in prompts]
        requests = [
            GenerateRequest(
                prompt_ids=ids,
                num_samples=num_samples,
                temperature=temperature,
                max_new_tokens=self._sampling.max_new_tokens,
                stop_token_ids=self._stop,
                seed=derive_seed(self._seed, purpose, prompt.id),
            )
            for ids, prompt in zip(prompt_ids, prompts, strict=True)
        ]
        answers = self._engine.generate(requests)
        return [
            [self._graded(prompt, ids, k, completion) for k, completion in enumerate(completions)]
            for prompt, ids, completions in zip(prompts, prompt_ids, answers, strict=True)
        ]

    def _graded(
        self, prompt: Prompt, prompt_ids: list[int], sample: int, completion: Completion
    ) -> Rollout:
        text = self._tokenizer.decode(completion.token_ids, skip_special_tokens=False)
        eos = self._tokenizer.eos_token
        return Rollout(
            prompt_id=prompt.id,
            sample=sample,
            prompt_ids=prompt_ids,
            response_ids=completion.token_ids,
            logprobs=completion.logprobs,
            mask=[True] * len(completion.token_ids),
            versions=completion.versions,
            finish_reason=completion.finish_reason,
            text=text,
            answer=prompt.answer,
            reward=self._task.grade(prompt, text.removesuffix(eos)),
        )


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """Token ids of the prompt in the tokenizer's chat template, ready for the assistant's turn."""
    return tokenizer.apply_chat_template(
        prompt.messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )


def derive_seed(seed: int, purpose: str, prompt_id: str) -> int:
    """A seed in [0, 2^31) that depends on nothing but its arguments.

    The engine numbers the samples of a request upwards from it; hashing keeps requests far apart.
    """
    digest = hashlib.sha256(f"{seed}/{purpose}/{prompt_id}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def group_metrics(groups: list[list[Rollout]]) -> dict[str, float]:
    """Rewards and lengths of a step, before any credit."""
    rollouts = [rollout for group in groups for rollout in group]
    rewards = [rollout.reward for rollout in rollouts if math.isfinite(rollout.reward)]
    lengths = [len(rollout.response_ids) for rollout in rollouts]
    equal = sum(len({rollout.reward for rollout in group}) == 1 for group in groups)
    return {
        "reward/mean": sum(rewards) / max(len(rewards), 1),
        "group/equal_rewards": equal / len(groups),
        "rollout/truncated": sum(r.finish_reason == "length" for r in rollouts) / len(rollouts),
        "rollout/tokens": float(sum(lengths)),
        "rollout/length_mean": sum(lengths) / len(lengths),
        "rollout/length_max": float(max(lengths)),
    }
