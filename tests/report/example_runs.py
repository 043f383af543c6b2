"""Run directories made up for the tests of the page."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from megatron_credit.batch.rollout import Rollout, Span, VersionSpan
from megatron_credit.batch.rollout_files import write_rollouts

MODEL = Path(__file__).parents[2] / "models/chain-sum-0.6m"
ATTACK = "</script><script>window.attacked = 1</script><img src=x onerror='window.attacked = 1'>"
METRICS = (
    {"step": 0, "eval/accuracy": 0.51953125},
    {
        "step": 1,
        "reward/mean": 0.1 + 0.2,
        "policy/entropy": 0.018604682420272706,
        "mismatch/logprob_abs": 3.0457364999432275e-07,
        "group/equal_rewards": 0.5,
        "timing/rollout_s": 0.5743276670000341,
        "timing/train_s": 1.1339680799992493,
        "grad_norm": math.nan,
    },
    {"step": 2, "reward/mean": 0.5, "eval/accuracy": 0.75, "policy/entropy": 0.02},
)


def rollout(text: str, **changes: object) -> Rollout:
    """A rollout of the shipped model's tokenizer with the numbers of a token method."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids = tokenizer(text)["input_ids"]
    count = len(ids)
    fields: dict = {
        "prompt_id": "sum/0",
        "sample": 0,
        "prompt_ids": tokenizer("1 + 2 =")["input_ids"],
        "response_ids": ids,
        "logprobs": [-0.25] * count,
        "mask": [True] * count,
        "versions": [VersionSpan(3, 0, count)],
        "finish_reason": "stop",
        "text": text,
        "answer": "3",
        "reward": 1.0,
        "outcome": "right",
        "parsed": "3",
        "source": "sums",
        "advantages": [1.5 / (at + 1) for at in range(count)],
        "token_values": {
            "policy_logprob": [-0.25 + 1e-7] * count,
            "entropy": [0.5] * count,
            "weight": [math.nan] + [0.25] * (count - 1),
        },
    }
    return Rollout(**fields | changes)


def write_example(run: Path) -> None:
    """Two steps with one group each: both outcomes with all that a record can hold, and equal
    rewards with hostile text and no advantages."""
    (run / "rollouts").mkdir(parents=True)
    config = {"policy": {"model": str(MODEL)}, "credit": {"method": "rredcot"}}
    (run / "config.json").write_text(json.dumps(config))
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in METRICS))
    right = rollout("1+2=3;\u2713<answer>3</answer>")
    wrong = rollout("1+2=4;\n<answer>4</answer>", sample=1, reward=0.0, outcome="wrong", parsed="4")
    count = len(wrong.response_ids)
    wrong = Rollout(**vars(wrong) | {
        "advantages": [-0.75] * count,
        "mask": [True] * (count - 2) + [False] * 2,
        "spans": {"attempt": [Span(0, count)], "step": [Span(0, 6, 0.125), Span(6, count)]},
        "evidence": {"sibling": f"1+2=3 {ATTACK}"},
    })
    write_rollouts(run / "rollouts/step-000001.jsonl", [right, wrong])
    hostile = [
        rollout(ATTACK, sample=sample, prompt_id=ATTACK, parsed=ATTACK, answer=ATTACK,
                source=ATTACK, finish_reason="length", advantages=[], token_values={})
        for sample in range(2)
    ]
    write_rollouts(run / "rollouts/step-000002.jsonl", hostile)


def write_large_run(run: Path, *, num_rollouts: int, num_tokens: int, num_steps: int = 50) -> None:
    """A run of groups of 8 with noise where a real one has numbers: as hard to pack, or harder.

    Ids follow Zipf's law over 30,000 words; advantages differ from token to token, and there are
    policy_logprob, entropy and weight.
    """
    (run / "rollouts").mkdir(parents=True)
    random = np.random.default_rng(0)
    words = write_words(run / "model", 30_000)
    steps = range(1, num_steps + 1)
    lines = [{"step": step, "reward/mean": float(random.random())} for step in steps]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    num_groups = num_rollouts // 8 // num_steps
    for step in steps:
        path = run / f"rollouts/step-{step:06d}.jsonl"
        write_rollouts(path, large_step(random, words, step, num_groups, num_tokens))


def large_step(
    random: np.random.Generator, words: list[str], step: int, num_groups: int, num_tokens: int
) -> Iterator[Rollout]:
    """The rollouts of one step."""
    for group in range(num_groups):
        prompt = zipf_ids(random, len(words), 60)
        for sample in range(8):
            ids = zipf_ids(random, len(words), num_tokens)
            reward = float(random.random() < 0.5)
            yield noise_rollout(random, f"words/{step}/{group}", prompt, ids, sample, reward, words)


def noise_rollout(
    random: np.random.Generator,
    prompt_id: str,
    prompt: list[int],
    ids: list[int],
    sample: int,
    reward: float,
    words: list[str],
) -> Rollout:
    """A rollout whose numbers are distributed as those of a bf16 run with token credit."""
    count = len(ids)
    logprob = -random.exponential(0.4, count) * random.random(count) ** 4
    weight = random.lognormal(0, 0.5, count)
    return Rollout(
        prompt_id=prompt_id,
        sample=sample,
        prompt_ids=prompt,
        response_ids=ids,
        logprobs=logprob.tolist(),
        mask=[True] * count,
        versions=[VersionSpan(0, 0, count)],
        finish_reason="stop",
        text="".join(words[token_id] for token_id in ids),
        answer="7",
        reward=reward,
        outcome="right" if reward else "wrong",
        parsed=str(sample),
        advantages=((reward - 0.5) * weight).tolist(),
        token_values={
            "policy_logprob": (logprob + random.normal(0, 0.01, count)).tolist(),
            "entropy": random.gamma(0.3, 1.0, count).tolist(),
            "weight": weight.tolist(),
        },
    )


def zipf_ids(random: np.random.Generator, vocabulary: int, count: int) -> list[int]:
    """Token ids, small ones often."""
    return np.minimum(random.zipf(1.2, count) - 1, vocabulary - 1).tolist()


def write_words(model: Path, count: int) -> list[str]:
    """Saves a tokenizer of made-up words and returns the text of each id."""
    letters = "aeiou", "bdfgklmnprst"
    names = [
        f"\u0120{letters[1][i % 12]}{letters[0][i // 12 % 5]}{letters[1][i // 60 % 12]}{i // 720}"
        for i in range(count)
    ]
    words = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    words.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(model)
    return [name.replace("\u0120", " ") for name in names]
