"""A weighted mix of reasoning-gym datasets, checked by their own scorers."""

import bisect
import difflib
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from random import Random
from typing import Any

from megatron_credit.batch.rollout import Prompt
from megatron_credit.rewards.config import ReasoningGymConfig
from megatron_credit.rewards.gym import NAME_KEY
from megatron_credit.rewards.pool import Question, VerifierPool
from megatron_credit.rewards.verdict import Verdict
from megatron_credit.tasks.gym_config import (
    ITEMS_PER_DATASET,
    SEEDS_PER_DATASET,
    GymDatasetConfig,
    GymMixConfig,
)

VERIFIER = "gym"
SAMPLED_PROMPTS = 256
# So many questions in a row that were drawn before mean that a dataset has too few of them.
MAX_REPEATS = 1000

Item = dict[str, Any]


class GymMix:
    """The task: each prompt is an item of one of the datasets, chosen by their weights.

    Raises ValueError where a dataset does not exist, refuses its options or has no references that
    its own scorer would accept.
    """

    def __init__(self, config: GymMixConfig) -> None:
        self._config = config
        self._train = _create_all(config, config.seed)
        self._cumulative = list(itertools.accumulate(item.weight for item in config.datasets))
        self._held_out = self._draw_held_out()
        self._held_out_questions = frozenset(item["question"] for _, item in self._held_out)
        self._eval_prompts = [
            self._prompt(f"gym/eval/{number}", place, item)
            for number, (place, item) in enumerate(self._held_out)
        ]
        self._pool = VerifierPool(
            {VERIFIER: ReasoningGymConfig(answer_in=config.answer_in)}, config.verifier_pool
        )
        with ExitStack() as unless_checked:
            unless_checked.callback(self._pool.close)
            self._check_references()
            unless_checked.pop_all()

    def train_prompt(self, index: int) -> Prompt:
        """Training prompt number `index`; a held-out question is replaced by the next one."""
        if index < 0:
            raise ValueError(f"train_prompt got index {index}; prompts are numbered from 0")
        place = self._choose(index)
        for number in range(index, index + MAX_REPEATS):
            item = self._train[place][number % ITEMS_PER_DATASET]
            if item["question"] not in self._held_out_questions:
                return self._prompt(f"gym/train/{index}", place, item)
        raise ValueError(_too_few(self._config.datasets[place]))

    def eval_prompts(self) -> list[Prompt]:
        """The held-out prompts, `eval_size` different questions, dataset after dataset."""
        return self._eval_prompts

    def grade(self, answers: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """right where a dataset's scorer gives full marks, in processes of their own."""
        return self._pool.grade(
            [Question(VERIFIER, text, prompt.answer, prompt.metadata) for prompt, text in answers]
        )

    def longest_prompts(self) -> list[Prompt]:
        """A sample that has items of every dataset."""
        return [*self.eval_prompts(), *map(self.train_prompt, range(SAMPLED_PROMPTS))]

    def report(self) -> dict[str, Any]:
        """How many questions of each dataset are held out."""
        counts = dict.fromkeys((dataset.name for dataset in self._config.datasets), 0)
        for place, _ in self._held_out:
            counts[self._config.datasets[place].name] += 1
        summary = ", ".join(f"{count} of {name}" for name, count in counts.items())
        return {"summary": [f"reasoning-gym; held out: {summary}"], "held_out": counts}

    def fingerprint(self) -> str:
        """A digest of what the questions follow from."""
        questions = self._config.model_dump_json(exclude={"verifier_pool", "answer_in"})
        return hashlib.sha256(questions.encode()).hexdigest()[:16]

    def close(self) -> None:
        """Ends the processes that check answers."""
        self._pool.close()

    def _choose(self, index: int) -> int:
        """The dataset of training prompt `index`."""
        drawn = Random(self._config.seed + index).random() * self._cumulative[-1]
        return min(bisect.bisect_right(self._cumulative, drawn), len(self._cumulative) - 1)

    def _draw_held_out(self) -> list[tuple[int, Item]]:
        """(place of the dataset, item), each dataset's share of `eval_size`."""
        total, size = self._cumulative[-1], self._config.eval_size
        ends = [round(size * end / total) for end in self._cumulative]
        held_out, seen = [], set()
        for place, dataset in enumerate(_create_all(self._config, self._config.eval_seed)):
            numbers = iter(range(ITEMS_PER_DATASET))
            while len(held_out) < ends[place]:
                item = self._next_new(place, dataset, numbers, seen)
                seen.add(item["question"])
                held_out.append((place, item))
        return held_out

    def _next_new(self, place: int, dataset: Any, numbers: Iterator[int], seen: set[str]) -> Item:
        for number in itertools.islice(numbers, MAX_REPEATS):
            item = dataset[number]
            if item["question"] not in seen:
                return item
        raise ValueError(_too_few(self._config.datasets[place]))

    def _prompt(self, name: str, place: int, item: Item) -> Prompt:
        dataset = self._config.datasets[place].name
        question, instruction = item["question"], self._config.instruction
        return Prompt(
            id=name,
            messages=[
                {
                    "role": "user",
                    "content": f"{question}\n{instruction}" if instruction else question,
                }
            ],
            answer=item["answer"] or "",
            metadata=_as_json({**item["metadata"], NAME_KEY: dataset}, dataset),
            source=dataset,
        )

    def _check_references(self) -> None:
        prompts = self._eval_prompts
        problems = self._pool.check_references(
            [Question(VERIFIER, "", prompt.answer, prompt.metadata) for prompt in prompts]
        )
        for prompt, problem in zip(prompts, problems, strict=True):
            if problem:
                raise ValueError(
                    f"dataset {prompt.source!r} cannot be a task: {problem}; take it out of the mix"
                )


def _create_all(config: GymMixConfig, seed: int) -> list[Any]:
    """The datasets, each on seeds of its own from `seed` on."""
    return [
        _create(dataset, seed + place * SEEDS_PER_DATASET)
        for place, dataset in enumerate(config.datasets)
    ]


def _create(config: GymDatasetConfig, seed: int) -> Any:
    # Imports about a hundred generators, which takes seconds: not for who only reads a config.
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if config.name not in DATASETS:
        near = difflib.get_close_matches(config.name, DATASETS, 1)
        hint = f"did you mean {near[0]!r}?" if near else "see reasoning_gym.factory.DATASETS"
        raise ValueError(f"reasoning-gym has no dataset {config.name!r}; {hint}")
    try:
        return reasoning_gym.create_dataset(
            config.name, seed=seed, size=ITEMS_PER_DATASET, **config.options
        )
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(
            f"reasoning-gym's {config.name} refuses options = {config.options}: {error}"
        ) from None


def _as_json(metadata: dict[str, Any], dataset: str) -> dict[str, Any]:
    """The metadata as it comes back from a file of rollouts."""
    try:
        return json.loads(json.dumps(metadata))
    except TypeError as error:
        raise ValueError(
            f"dataset {dataset!r} cannot be a task: its items are not JSON ({error}); "
            "take it out of the mix"
        ) from None


def _too_few(dataset: GymDatasetConfig) -> str:
    return (
        f"reasoning-gym's {dataset.name} with options = {dataset.options} has too few different "
        "questions; lower eval_size or allow more in its options"
    )
