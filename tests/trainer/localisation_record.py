"""Small records for the localisation benchmark: written solutions of sums, exact and forgetful."""

from pathlib import Path
from random import Random

from transformers import AutoTokenizer

from megatron_credit.batch.rollout import Prompt, Rollout, VersionSpan
from megatron_credit.batch.rollout_files import write_rollouts
from megatron_credit.data.chat import encode_prompt
from megatron_credit.tasks.chain_sum import ChainSum, ChainSumConfig
from megatron_credit.tasks.solver import exact_solution, forgetful_solution

MODEL = Path(__file__).parents[2] / "models" / "chain-sum-0.6m"
GROUPS = ("1010", "1100", "0000", "1111", "0111")
"""Of each group who is right (1) and wrong (0)."""
WRONG_IN_MIXED, WRONG_IN_ALL_WRONG = 5, 4


def write_records(directory: Path) -> None:
    """A directory of the form that the benchmark keeps its rollouts in."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    for form in ("tags", "boxed"):
        task = ChainSum(ChainSumConfig(answer_format=form))
        (directory / form).mkdir(parents=True)
        prompts = [prompt for prompt in map(task.train_prompt, range(40)) if can_go_wrong(prompt)]
        rollouts = []
        for number, group in enumerate(GROUPS):
            rollouts += make_group(tokenizer, task, prompts[number], group)
        write_rollouts(directory / form / "step-000001.jsonl", rollouts)


def can_go_wrong(prompt: Prompt) -> bool:
    """Forgetting changes the answer."""
    question = prompt.messages[0]["content"]
    return wrong_solution(question)[-12:] != exact_solution(question)[-12:]


def wrong_solution(question: str) -> str:
    """The solution of who forgets every carry."""
    return forgetful_solution(question, forget=1.0, rng=Random(0))


def make_group(tokenizer, task: ChainSum, prompt: Prompt, group: str) -> list[Rollout]:
    """Rollouts of a prompt."""
    question = prompt.messages[0]["content"]
    found = []
    for sample, outcome in enumerate(group):
        text = exact_solution(question) if outcome == "1" else wrong_solution(question)
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        (verdict,) = task.grade([(prompt, text)])
        assert verdict.reward == float(outcome), (text, prompt)
        found.append(
            Rollout(
                prompt_id=prompt.id,
                sample=sample,
                prompt_ids=encode_prompt(tokenizer, prompt),
                response_ids=ids,
                logprobs=[-0.5] * len(ids),
                mask=[True] * len(ids),
                versions=[VersionSpan(0, 0, len(ids))],
                finish_reason="stop",
                text=text,
                answer=prompt.answer,
                reward=verdict.reward,
                outcome=verdict.outcome,
                parsed=verdict.parsed,
                messages=prompt.messages,
                metadata=prompt.metadata,
            )
        )
    return found
