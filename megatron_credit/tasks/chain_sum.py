"""Chains of additions and subtractions, made and checked by reasoning-gym's `chain_sum`."""

import hashlib
from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from megatron_credit.batch.rollout import Prompt
from megatron_credit.rewards.answer_tags import MAX_ANSWER_CHARS, last_answer
from megatron_credit.rewards.find_answer import last_box
from megatron_credit.rewards.numbers import read_number
from megatron_credit.rewards.verdict import Verdict
from megatron_credit.settings import Settings
from megatron_credit.tasks.solver import ask_for_box, exact_solution

# reasoning-gym draws item i from the seed `seed + i`: streams closer than this share their items.
MIN_SEED_DISTANCE = 1_000_000
# Where the replacement of a held-out training question is drawn: beyond every index in use.
REPLACEMENT_STRIDE = 2**32
SAMPLED_PROMPTS = 256


class ChainSumConfig(Settings):
    """Which sums are asked, and which ones are held out for evaluation."""

    kind: Literal["chain_sum"] = "chain_sum"
    """Which task this is."""
    min_terms: int = Field(default=4, ge=1)
    """Fewest numbers in a sum."""
    max_terms: int = Field(default=6, ge=1)
    """Most numbers in a sum."""
    min_digits: int = Field(default=1, ge=1)
    """Fewest digits of the numbers in a sum (all numbers of one sum have equally many)."""
    max_digits: int = Field(default=1, ge=1)
    """Most digits of the numbers in a sum."""
    seed: int = Field(default=10_000_000, ge=0)
    """Training question i is drawn from seed + i."""
    eval_seed: int = Field(default=20_000_000, ge=0)
    """Held-out questions are drawn from eval_seed on; it must be far from `seed`."""
    eval_size: int = Field(default=256, ge=1)
    """Number of held-out questions, all different."""
    answer_format: Literal["tags", "boxed"] = "tags"
    r"""tags: the answer stands in the last <answer>..</answer>; boxed: in the last \boxed{..}, and
    the question also says "Put the answer in a box."."""

    @model_validator(mode="after")
    def _enough_questions(self) -> Self:
        _check_range("terms", self.min_terms, self.max_terms)
        _check_range("digits", self.min_digits, self.max_digits)
        distance = abs(self.seed - self.eval_seed)
        if distance < MIN_SEED_DISTANCE:
            raise ValueError(
                f"seed = {self.seed} and eval_seed = {self.eval_seed} are {distance} apart, "
                f"so training would see held-out questions; keep them {MIN_SEED_DISTANCE} apart"
            )
        possible = _num_questions(self)
        if 2 * self.eval_size > possible:
            raise ValueError(
                f"eval_size = {self.eval_size} would hold out more than half of the {possible} "
                f"questions there are; use at most {possible // 2} or allow more terms or digits"
            )
        return self


def _check_range(name: str, low: int, high: int) -> None:
    if high < low:
        raise ValueError(
            f"max_{name} = {high} is below min_{name} = {low}; raise max_{name} or lower the other"
        )


def _num_questions(config: ChainSumConfig) -> int:
    """Number of different questions the configuration allows."""
    total = 0
    for digits in range(config.min_digits, config.max_digits + 1):
        num_numbers = 10 if digits == 1 else 9 * 10 ** (digits - 1)
        for terms in range(config.min_terms, config.max_terms + 1):
            total += num_numbers**terms * 2 ** (terms - 1)
    return total


class ChainSum:
    """The task: `6 + 0 - 1 + 8` asked in words, the result expected in tags or in a box."""

    def __init__(self, config: ChainSumConfig) -> None:
        # Imports about a hundred generators, which takes seconds: not for who only reads a config.
        import reasoning_gym

        self._config = config
        sizes = config.model_dump(include={"min_terms", "max_terms", "min_digits", "max_digits"})
        self._train = reasoning_gym.create_dataset("chain_sum", seed=config.seed, **sizes)
        self._eval = reasoning_gym.create_dataset("chain_sum", seed=config.eval_seed, **sizes)
        self._held_out = self._draw_held_out(config.eval_size)
        self._held_out_questions = frozenset(item["question"] for item in self._held_out)

    def train_prompt(self, index: int) -> Prompt:
        """Training prompt number `index`; a held-out question is replaced by another one."""
        if index < 0:
            raise ValueError(f"train_prompt got index {index}; prompts are numbered from 0")
        item = self._train[index]
        replacement = index
        while item["question"] in self._held_out_questions:
            replacement += REPLACEMENT_STRIDE
            item = self._train[replacement]
        return self._prompt(f"chain_sum/train/{index}", item)

    def eval_prompts(self) -> list[Prompt]:
        """The held-out prompts, `eval_size` different questions."""
        return [
            self._prompt(f"chain_sum/eval/{number}", item)
            for number, item in enumerate(self._held_out)
        ]

    def grade(self, answers: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """right where the last answer of a text equals the prompt's; quick, in this process."""
        return [self._verdict(prompt, text) for prompt, text in answers]

    def longest_prompts(self) -> list[Prompt]:
        """A sample that has every number of terms and digits many times."""
        return [*self.eval_prompts(), *map(self.train_prompt, range(SAMPLED_PROMPTS))]

    def report(self) -> dict[str, Any]:
        """Nothing is ever left out of generated questions."""
        return {"summary": [f"chain sums; {len(self._held_out)} are held out"]}

    def fingerprint(self) -> str:
        """A digest of the configuration, which the questions follow from.

        The sums do not depend on the format, so runs with tags keep the digest they always had.
        """
        unsaid = {"answer_format"} if self._config.answer_format == "tags" else None
        digest = hashlib.sha256(self._config.model_dump_json(exclude=unsaid).encode())
        return digest.hexdigest()[:16]

    def close(self) -> None:
        """Nothing was started."""

    def _verdict(self, prompt: Prompt, text: str) -> Verdict:
        answer = (self._last_answer(text) or "").strip()
        if not answer:
            return Verdict("unparsed")
        # The reference stands for all spellings of the right answer.
        if self._is_right(answer, prompt.answer):
            return Verdict("right", prompt.answer)
        return Verdict("wrong", _normal_form(answer))

    def _last_answer(self, text: str) -> str | None:
        return last_box(text) if self._config.answer_format == "boxed" else last_answer(text)

    def _is_right(self, answer: str, reference: str) -> bool:
        """reasoning-gym gives partial marks for containing the right digits: only full ones count.
        Number parsing is quadratic in the length, so long answers are not scored."""
        if not answer.isascii() or len(answer) > MAX_ANSWER_CHARS:
            return False
        return self._train.score_answer(answer, {"answer": reference}) >= 1.0

    def _draw_held_out(self, size: int) -> list[dict[str, Any]]:
        drawn: dict[str, dict[str, Any]] = {}
        index = 0
        while len(drawn) < size:
            item = self._eval[index]
            drawn.setdefault(item["question"], item)
            index += 1
        return list(drawn.values())

    def _prompt(self, name: str, item: dict[str, Any]) -> Prompt:
        question = item["question"]
        if self._config.answer_format == "boxed":
            question = ask_for_box(question)
        return Prompt(
            id=name,
            messages=[{"role": "user", "content": question}],
            answer=item["answer"],
            metadata={
                "expression": item["metadata"]["expression"],
                "num_terms": item["metadata"]["num_terms"],
                "solution": exact_solution(question),
            },
        )


def _normal_form(answer: str) -> str:
    """An integer as Python writes it, so that equal wrong answers are equal texts."""
    found = read_number(answer)
    if found is None or found.unit or found.value.denominator != 1:
        return answer
    return str(found.value.numerator)
