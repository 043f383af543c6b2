"""Recorded rollouts to give credit to: real texts of the shipped model with their log-probs.

Six groups of four, as methods.md tells groups apart, in three forms: answers in tags, answers in a
box, and rollouts of up to two attempts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_credit.batch.rollout import Completion, Prompt, Rollout, VersionSpan
from megatron_credit.batch.rollout_files import write_rollouts
from megatron_credit.data.chat import encode_prompt
from megatron_credit.rewards.answer_tags import CLOSE_TAG, OPEN_TAG
from megatron_credit.rewards.verdict import Verdict
from megatron_credit.tasks.chain_sum import ChainSum, ChainSumConfig
from megatron_credit.tasks.solver import CLOSE_BOX, OPEN_BOX
from megatron_credit.trainer.attempts import Attempt, Chain
from megatron_credit.trainer.feedback_turn import read_feedback_turn

MODEL = Path(__file__).parents[2] / "models" / "chain-sum-credit"
TAGS, BOXED, ATTEMPTS = "tags", "boxed", "attempts"
"""Forms of the record, each in the file of its name."""
TASK = ChainSumConfig(max_terms=5)
GROUPS = ("1010", "0111", "0000", "1111", "10?1", "0010")
"""Of each group who is right (1), wrong (0) and without a verdict (?)."""
MIXED, ALL_WRONG, ALL_RIGHT, UNKNOWN, ONE_RIGHT = (0, 1), 2, 3, 4, 5
GROUP_SIZE = 4
NUM_PROMPTS, NUM_SAMPLES, MAX_NEW_TOKENS = 16, 16, 56
FEEDBACK = "Wrong, try again."
NO_VERDICT = Verdict("timeout", detail="the verifier was slow")


@dataclass(frozen=True)
class Question:
    """A prompt with sampled attempts at it."""

    prompt: Prompt
    prompt_ids: list[int]
    attempts: dict[str, list[Attempt]]
    """Right (1) and wrong (0) ones."""

    def serves(self, group: str) -> bool:
        """There are enough attempts for such a group; who has no verdict was right."""
        num_wrong = group.count("0")
        wanted = {"0": num_wrong, "1": len(group) - num_wrong}
        return all(len(self.attempts[kind]) >= number for kind, number in wanted.items())


def write_records(directory: Path) -> None:
    """Samples at temperature 1, and writes the three files."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    task = ChainSum(TASK)
    torch.manual_seed(11)
    questions = [sample(model, tokenizer, task, number) for number in range(NUM_PROMPTS)]
    first, chains = [], []
    for group in GROUPS:
        question = next(one for one in questions if one.serves(group))
        questions.remove(question)
        first += singles(question, group)
        chains += pairs(question, group)
    records = {
        TAGS: [whole(tokenizer, chain, with_spans=False) for chain in first],
        ATTEMPTS: [whole(tokenizer, chain, with_spans=True) for chain in chains],
    }
    boxes = ChainSum(TASK.model_copy(update={"answer_format": "boxed"}))
    asked = {prompt.id: prompt for prompt in map(boxes.train_prompt, range(NUM_PROMPTS))}
    records[BOXED] = [boxed(tokenizer, one, asked[one.prompt_id]) for one in records[TAGS]]
    for name, rollouts in records.items():
        scored = [with_logprobs(model, rollout) for rollout in rollouts]
        write_rollouts(directory / f"{name}.jsonl", scored)


def sample(model: Any, tokenizer: Any, task: ChainSum, number: int) -> Question:
    """Attempts at one prompt, sampled together and graded."""
    prompt = task.train_prompt(number)
    prompt_ids = encode_prompt(tokenizer, prompt)
    found_NL = model.generate(
        torch.tensor([prompt_ids] * NUM_SAMPLES),
        attention_mask=torch.ones(NUM_SAMPLES, len(prompt_ids), dtype=torch.int64),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=MAX_NEW_TOKENS,
    )
    attempts: dict[str, list[Attempt]] = {"0": [], "1": []}
    for ids_L in found_NL:
        ids = ids_L[len(prompt_ids) :].tolist()
        if tokenizer.eos_token_id not in ids:
            continue
        ids = ids[: ids.index(tokenizer.eos_token_id) + 1]
        (verdict,) = task.grade([(prompt, text_of(tokenizer, ids))])
        completion = Completion(
            token_ids=ids,
            logprobs=[0.0] * len(ids),
            finish_reason="stop",
            versions=[VersionSpan(0, 0, len(ids))],
        )
        found = Attempt(completion=completion, verdict=verdict)
        attempts["1" if verdict.reward == 1 else "0"].append(found)
    return Question(prompt, prompt_ids, {key: varied(own) for key, own in attempts.items()})


def varied(attempts: list[Attempt]) -> list[Attempt]:
    """The attempts, those that say what an earlier one did behind all others."""
    texts = [one.completion.token_ids for one in attempts]
    repeats = [texts[:number].count(text) for number, text in enumerate(texts)]
    order = sorted(range(len(attempts)), key=lambda number: repeats[number])
    return [attempts[number] for number in order]


def text_of(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text without the token that ended it."""
    return tokenizer.decode(ids[:-1], skip_special_tokens=False)


def singles(question: Question, group: str) -> list[Chain]:
    """The rollouts of a group, of one attempt each."""
    left = {kind: list(attempts) for kind, attempts in question.attempts.items()}
    chains = []
    for row, outcome in enumerate(group):
        taken = left["0" if outcome == "0" else "1"].pop(0)
        if outcome == "?":
            taken = replace(taken, verdict=NO_VERDICT)
        chains.append(chain(question, row, [taken]))
    return chains


def pairs(question: Question, group: str) -> list[Chain]:
    """The same with attempts: who is wrong tries again in vain, others fail first if they can."""
    failures = question.attempts["0"]
    chains = []
    for row, one in enumerate(singles(question, group)):
        (last,) = one.attempts
        fails_first = failures and (last.failed or row % 2 == 0)
        before = [failures[row % len(failures)]] if fails_first else []
        chains.append(chain(question, row, [*before, last]))
    return chains


def chain(question: Question, row: int, attempts: list[Attempt]) -> Chain:
    """A rollout of these attempts."""
    return Chain(
        prompt=question.prompt,
        prompt_ids=question.prompt_ids,
        name=question.prompt.id,
        sample=row,
        attempts=attempts,
    )


def whole(tokenizer: Any, one: Chain, *, with_spans: bool) -> Rollout:
    """The record of a chain."""
    turn = read_feedback_turn(tokenizer, one.prompt, FEEDBACK, (tokenizer.eos_token_id,))
    text = text_of(tokenizer, one.response_ids(turn.token_ids))
    return one.rollout(text=text, with_spans=with_spans, feedback_ids=turn.token_ids)


def boxed(tokenizer: Any, rollout: Rollout, prompt: Prompt) -> Rollout:
    """The same answer in a box, to the prompt that asks for one."""
    text = rollout.text.replace(OPEN_TAG, OPEN_BOX).replace(CLOSE_TAG, CLOSE_BOX)
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return replace(
        rollout,
        messages=prompt.messages,
        metadata=prompt.metadata,
        prompt_ids=encode_prompt(tokenizer, prompt),
        text=text,
        response_ids=ids,
        mask=[True] * len(ids),
        versions=[VersionSpan(0, 0, len(ids))],
    )


@torch.no_grad()
def with_logprobs(model: Any, rollout: Rollout) -> Rollout:
    """The rollout with the model's log-probs of what it sampled; NaN on feedback."""
    ids_1L = torch.tensor([[*rollout.prompt_ids, *rollout.response_ids]])
    first = len(rollout.prompt_ids)
    logprob_TV = model(ids_1L).logits[0, first - 1 : -1].log_softmax(-1)
    logprobs = logprob_TV.gather(1, ids_1L[0, first:, None])[:, 0].tolist()
    pairs = zip(logprobs, rollout.mask, strict=True)
    return replace(rollout, logprobs=[value if trained else math.nan for value, trained in pairs])
