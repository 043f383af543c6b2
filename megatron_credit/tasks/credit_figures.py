"""What the credit model can do: the figures of its model card."""

from random import Random
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

from megatron_credit.batch.evidence_text import RETRY, solution_below, system_solution
from megatron_credit.batch.rollout import Prompt
from megatron_credit.tasks.accuracy import Accuracy, measure_accuracy
from megatron_credit.tasks.chain_sum import ChainSum, ChainSumConfig
from megatron_credit.tasks.evidence_share import (
    EvidenceShares,
    WrongResponse,
    measure_evidence_shares,
)
from megatron_credit.tasks.sample import sample_responses, write_chat
from megatron_credit.tasks.solver import forgetful_solution

EASY = ChainSumConfig(min_terms=4, max_terms=6)
LONG = ChainSumConfig(min_terms=7, max_terms=9)
HARD = ChainSumConfig(min_terms=10, max_terms=12)
GROUP_SIZE = 8
MAX_ATTEMPTS = 3
MAX_NEW_TOKENS = 150
"""More than the longest solution of the hard sums."""

Model = tuple[Qwen3ForCausalLM, PreTrainedTokenizerBase]


class Groups(NamedTuple):
    """Groups of 8 responses at temperature 1."""

    all_wrong: float
    """Share of the groups with no right response."""
    all_right: float


class Attempt(NamedTuple):
    """Attempts of one number at temperature 1; shares are of the chats that reached it."""

    num_reached: int
    right: float
    repeated: float
    """Word by word the attempt before."""


class SizeFigures(NamedTuple):
    """What the model reaches on the held-out sums of one size."""

    config: ChainSumConfig
    sampled: Accuracy
    greedy: Accuracy
    boxed: Accuracy
    """Sampled, with the answer asked for in a box."""
    groups: Groups
    shares: EvidenceShares
    """On the wrong ones of one response to each question."""


class CreditFigures(NamedTuple):
    """All figures."""

    sizes: list[SizeFigures]
    attempts: list[Attempt]
    copied_from_user_turn: float
    """Share of responses that are the pupil's solution in their context, word by word."""
    copied_from_system_turn: float


def measure_credit_figures(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> CreditFigures:
    """All figures, on the held-out questions."""
    both = (model, tokenizer)
    return CreditFigures(
        [_measure_size(both, config) for config in (EASY, LONG, HARD)],
        measure_attempts(both),
        measure_copying(both, in_system_turn=False),
        measure_copying(both, in_system_turn=True),
    )


def measure_groups(both: Model, config: ChainSumConfig) -> Groups:
    """A group about each held-out question."""
    task = ChainSum(config)
    prompts = task.eval_prompts()
    num_right = [0] * len(prompts)
    for number in range(GROUP_SIZE):
        verdicts = task.grade(_respond(both, prompts, seed=1 + number)[0])
        for place, verdict in enumerate(verdicts):
            num_right[place] += verdict.outcome == "right"
    return Groups(num_right.count(0) / len(prompts), num_right.count(GROUP_SIZE) / len(prompts))


def wrong_responses(
    both: Model, config: ChainSumConfig, *, num_prompts: int
) -> list[WrongResponse]:
    """The wrong ones of a response to each of the first `num_prompts` held-out questions.

    The wrong answer that evidence shows is the response's own, as in a group where it is the first.
    """
    task = ChainSum(config)
    answers, responses = _respond(both, task.eval_prompts()[:num_prompts], seed=0)
    return [
        WrongResponse(_question(prompt), token_ids, text, prompt.answer, verdict.parsed or "")
        for (prompt, text), token_ids, verdict in zip(
            answers, responses, task.grade(answers), strict=True
        )
        if verdict.outcome == "wrong"
    ]


def measure_attempts(both: Model, *, num_prompts: int = 256) -> list[Attempt]:
    """Attempts 1 to 3 at easy sums, each wrong one answered by the retry sentence."""
    task = ChainSum(EASY)
    open_chats = [(prompt, list(prompt.messages), "") for prompt in task.eval_prompts()]
    open_chats = open_chats[:num_prompts]
    attempts = []
    for number in range(MAX_ATTEMPTS):
        responses = _sample(both, [chat for _, chat, _ in open_chats], seed=number)
        texts = both[1].batch_decode(responses, skip_special_tokens=True)
        verdicts = task.grade(
            [(prompt, text) for (prompt, _, _), text in zip(open_chats, texts, strict=True)]
        )
        right = [verdict.outcome == "right" for verdict in verdicts]
        repeated = [text == before for (_, _, before), text in zip(open_chats, texts, strict=True)]
        count = len(open_chats)
        attempts.append(Attempt(count, sum(right) / count, sum(repeated) / count))
        open_chats = [
            (prompt, [*chat, _turn("assistant", text), _turn("user", RETRY)], text)
            for (prompt, chat, _), text, passed in zip(open_chats, texts, right, strict=True)
            if not passed
        ]
    return attempts


def measure_copying(both: Model, *, in_system_turn: bool, num_prompts: int = 256) -> float:
    """How often the pupil's solution of an easy sum, once shown, is given again."""
    rng = Random(0)
    chats, shown = [], []
    for prompt in ChainSum(EASY).eval_prompts()[:num_prompts]:
        question = _question(prompt)
        solution = forgetful_solution(question, forget=0.7, rng=rng)
        shown.append(solution)
        if in_system_turn:
            chats.append([_turn("system", system_solution(solution)), _turn("user", question)])
        else:
            chats.append([_turn("user", solution_below(question, solution))])
    texts = both[1].batch_decode(_sample(both, chats, seed=0), skip_special_tokens=True)
    return sum(text == solution for text, solution in zip(texts, shown, strict=True)) / len(shown)


def _measure_size(both: Model, config: ChainSumConfig) -> SizeFigures:
    tags = ChainSum(config)
    boxed = ChainSum(config.model_copy(update={"answer_format": "boxed"}))

    def accuracy(task: ChainSum, temperature: float) -> Accuracy:
        return measure_accuracy(
            *both,
            task,
            task.eval_prompts(),
            temperature=temperature,
            max_new_tokens=MAX_NEW_TOKENS,
        )

    return SizeFigures(
        config,
        accuracy(tags, 1.0),
        accuracy(tags, 0.0),
        accuracy(boxed, 1.0),
        measure_groups(both, config),
        measure_evidence_shares(*both, wrong_responses(both, config, num_prompts=config.eval_size)),
    )


def _respond(
    both: Model, prompts: list[Prompt], *, seed: int
) -> tuple[list[tuple[Prompt, str]], list[list[int]]]:
    """A response to each prompt: with its text, and as token ids."""
    responses = _sample(both, [prompt.messages for prompt in prompts], seed=seed)
    texts = both[1].batch_decode(responses, skip_special_tokens=True)
    return list(zip(prompts, texts, strict=True)), responses


def _sample(both: Model, chats: list[list[dict[str, str]]], *, seed: int) -> list[list[int]]:
    model, tokenizer = both
    return sample_responses(
        model,
        tokenizer,
        [write_chat(tokenizer, chat) for chat in chats],
        temperature=1.0,
        seed=seed,
        max_new_tokens=MAX_NEW_TOKENS,
    )


def _question(prompt: Prompt) -> str:
    return prompt.messages[-1]["content"]


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
