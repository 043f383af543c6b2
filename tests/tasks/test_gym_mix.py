import json
from collections import Counter

import pytest
from pydantic import ValidationError

from megatron_credit.rewards.config import PoolConfig
from megatron_credit.rewards.pool import VerifierPool
from megatron_credit.tasks.build import build_task
from megatron_credit.tasks.gym_config import GymMixConfig
from megatron_credit.tasks.gym_mix import GymMix

SUMS_OF_TWO_DIGITS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
DATASETS = [
    {"name": "chain_sum", "weight": 3.0, "options": SUMS_OF_TWO_DIGITS},
    {"name": "letter_counting"},
]


def config(**fields):
    return GymMixConfig.model_validate(
        {"datasets": DATASETS, "eval_size": 40, "verifier_pool": PoolConfig(workers=1)} | fields
    )


@pytest.fixture(scope="module")
def task():
    task = build_task(config(), None, tokenizer=None, seed=0)  # pyright: ignore[reportArgumentType]
    yield task
    task.close()


def question(prompt):
    return prompt.messages[0]["content"]


def test_prompts_are_fixed(task):
    prompt = task.train_prompt(3)
    assert prompt.id == "gym/train/3"
    assert prompt.source == "chain_sum"
    assert prompt.answer == "-4"
    content = (
        "State the final answer to the following arithmetic problem: 2 - 6 =\n"
        "Give the final answer between <answer> and </answer>."
    )
    assert prompt.messages == [{"role": "user", "content": content}]
    assert prompt.metadata["expression"] == "2 - 6"
    assert prompt.metadata["source_dataset"] == "chain_sum"


def test_train_prompts_have_the_shares_of_the_weights(task):
    sources = Counter(task.train_prompt(index).source for index in range(1000))
    assert sources.keys() == {"chain_sum", "letter_counting"}
    assert sources["chain_sum"] == pytest.approx(750, abs=70)  # five standard errors
    backwards = [task.train_prompt(index) for index in reversed(range(50))]
    assert backwards[::-1] == [task.train_prompt(index) for index in range(50)]


def test_held_out_questions_are_different_and_never_trained(task):
    held_out = [question(prompt) for prompt in task.eval_prompts()]
    assert len(set(held_out)) == len(held_out) == 40
    sources = Counter(prompt.source for prompt in task.eval_prompts())
    assert sources == {"chain_sum": 30, "letter_counting": 10}
    # 30 of the 200 sums of two digits are held out, so that many draws had to be replaced
    trained = {question(task.train_prompt(index)) for index in range(1500)}
    assert not trained & set(held_out)
    assert len([asked for asked in trained if "arithmetic" in asked]) == 170
    assert task.report()["held_out"] == {"chain_sum": 30, "letter_counting": 10}


def test_only_full_marks_are_right(task):
    sums = next(prompt for prompt in task.eval_prompts() if prompt.source == "chain_sum")
    letters = next(prompt for prompt in task.eval_prompts() if prompt.source == "letter_counting")
    answers = [
        (sums, f"so <answer>{sums.answer}</answer>"),
        (sums, f"<answer>{sums.answer}</answer> no, <answer>999</answer>"),
        (sums, f"<answer>the answer is {sums.answer}</answer>"),  # partial marks
        (letters, rf"\boxed{{{letters.answer}}}"),
        (letters, "<answer>99</answer>"),
        (letters, ""),
    ]
    outcomes = [verdict.outcome for verdict in task.grade(answers)]
    assert outcomes == ["right", "wrong", "wrong", "right", "wrong", "unparsed"]


def test_prompts_survive_json(task):
    for prompt in [*task.eval_prompts(), *map(task.train_prompt, range(50))]:
        assert json.loads(json.dumps(prompt.metadata)) == prompt.metadata


def test_fingerprint_follows_the_questions(task):
    for fields, same in (
        ({"verifier_pool": PoolConfig(workers=2)}, True),
        ({"answer_in": "boxed"}, True),
        ({"instruction": ""}, False),
        ({"seed": 1}, False),
    ):
        other = object.__new__(GymMix)
        other._config = config(**fields)
        assert (other.fingerprint() == task.fingerprint()) == same


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"datasets": []}, "at least 1 item"),
        ({"datasets": [{"name": "gcd", "weight": 0}]}, "greater than 0"),
        ({"datasets": [{"name": "gcd", "options": {"seed": 3}}]}, "options holds seed"),
        ({"eval_seed": 10_999_999}, "keep them 2000000 apart"),
    ],
)
def test_bad_configurations_are_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        config(**fields)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({"name": "chainsum"}, "no dataset 'chainsum'; did you mean 'chain_sum'?"),
        ({"name": "gcd", "options": {"terms": 3}}, "gcd refuses options = {'terms': 3}"),
        ({"name": "gcd", "options": {"min_value": 0}}, "gcd refuses options"),
        (
            {"name": "chain_sum", "options": SUMS_OF_TWO_DIGITS},
            "too few different questions; lower eval_size",
        ),
    ],
)
def test_unusable_datasets_are_refused(dataset, message):
    with pytest.raises(ValueError, match=message):
        GymMix(config(datasets=[dataset], eval_size=250))


def test_a_dataset_whose_references_cannot_be_checked_is_refused(monkeypatch):
    closed = []
    close = VerifierPool.close
    monkeypatch.setattr(VerifierPool, "close", lambda pool: closed.append(close(pool)))
    monkeypatch.setattr("megatron_credit.tasks.gym_mix._as_json", lambda metadata, dataset: {})
    with pytest.raises(ValueError, match=r"dataset 'gcd' cannot be a task: .* take it out of the"):
        GymMix(config(datasets=[{"name": "gcd"}], eval_size=2))
    assert closed
