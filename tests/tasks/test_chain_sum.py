import json
import os
import subprocess
import sys

import pytest
from pydantic import BaseModel, ValidationError

from megatron_credit.batch.rollout import Prompt
from megatron_credit.tasks import TaskConfig
from megatron_credit.tasks.chain_sum import ChainSum, ChainSumConfig
from megatron_credit.tasks.gym_config import GymDatasetConfig, GymMixConfig

QUESTION = "State the final answer to the following arithmetic problem: 6 + 7 - 8 + 8 ="
PROMPT = Prompt(id="x", messages=[{"role": "user", "content": QUESTION}], answer="13")


@pytest.fixture(scope="module")
def task():
    return ChainSum(ChainSumConfig())


@pytest.fixture(scope="module")
def boxed_task():
    return ChainSum(ChainSumConfig(answer_format="boxed"))


def question(prompt):
    return prompt.messages[0]["content"]


def test_the_questions_are_fixed(task):
    assert task.eval_prompts()[0] == Prompt(
        id="chain_sum/eval/0",
        messages=[
            {
                "role": "user",
                "content": "State the final answer to the following arithmetic problem: "
                "0 - 2 + 9 - 8 =",
            }
        ],
        answer="-1",
        metadata={
            "expression": "0 - 2 + 9 - 8",
            "num_terms": 4,
            "solution": "0-2=-2;-2+9=7;7-8=-1;<answer>-1</answer>",
        },
    )
    trained = [task.train_prompt(index).metadata["expression"] for index in (0, 1, 20_000)]
    assert trained == ["3 - 5 + 0 + 6 + 9", "6 - 3 + 8 - 3", "9 + 6 + 0 + 3 + 4"]


def test_answers_are_the_value_of_the_expression(task):
    for prompt in [*task.eval_prompts(), *map(task.train_prompt, range(500))]:
        words = prompt.metadata["expression"].replace("+ ", "+").replace("- ", "-").split()
        assert sum(map(int, words)) == int(prompt.answer)
        assert len(words) == prompt.metadata["num_terms"]
        assert 4 <= len(words) <= 6


def test_held_out_questions_are_never_trained(task):
    held_out = [question(prompt) for prompt in task.eval_prompts()]
    assert len(set(held_out)) == len(held_out) == 256
    assert not set(held_out) & {question(task.train_prompt(index)) for index in range(20_000)}


def test_a_held_out_training_question_is_replaced():
    # 2 200 questions in all, half of them held out: about every second draw has to be replaced
    config = ChainSumConfig(min_terms=1, max_terms=3, eval_size=1105)
    task = ChainSum(config)
    drawn = [question(task.train_prompt(index)) for index in range(2000)]
    held_out = {question(prompt) for prompt in task.eval_prompts()}
    assert len(held_out) == 1105
    assert not held_out & set(drawn)
    # with one question held out, all but a few of the draws stand as reasoning-gym made them
    plain = ChainSum(config.model_copy(update={"eval_size": 1}))
    kept = [index for index in range(2000) if question(plain.train_prompt(index)) == drawn[index]]
    assert 200 < len(kept) < 1800


def test_train_prompt_does_not_depend_on_the_calls_before():
    config = ChainSumConfig(min_terms=1, max_terms=3, eval_size=1105)
    forwards, backwards = ChainSum(config), ChainSum(config)
    ahead = [forwards.train_prompt(index) for index in range(300)]
    back = [backwards.train_prompt(index) for index in reversed(range(300))]
    assert ahead == back[::-1]
    assert forwards.train_prompt(17) == ahead[17]


def test_eval_prompts_do_not_depend_on_the_training_seed(task):
    other = ChainSum(ChainSumConfig(seed=30_000_000))
    assert other.eval_prompts() == task.eval_prompts()
    assert other.train_prompt(0) != task.train_prompt(0)


def test_negative_index_is_refused(task):
    with pytest.raises(ValueError, match="got index -1; prompts are numbered from 0"):
        task.train_prompt(-1)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<answer>13</answer>", 1.0),
        ("6+7=13;13-8=5;5+8=13;<answer>13</answer>", 1.0),
        ("<answer> 13\n</answer>", 1.0),
        ("<answer>+13</answer>", 1.0),
        ("<answer>013</answer>", 1.0),
        ("<answer>13.0</answer>", 1.0),
        ("<answer>3</answer><answer>13</answer>", 1.0),
        ("<answer>13</answer><answer>3</answer>", 0.0),
        ("<answer>13</answer> and then <answer>", 1.0),
        ("<answer>-13</answer>", 0.0),
        ("<answer>13.5</answer>", 0.0),
        ("<answer>130</answer>", 0.0),
        ("<answer>the answer is 13</answer>", 0.0),  # reasoning-gym's partial marks
        ("<answer>13 or 14</answer>", 0.0),
        ("<answer>13 13</answer>", 0.0),
        ("<answer>6+7</answer>", 0.0),
        ("<answer></answer>", 0.0),
        ("<answer>nan</answer>", 0.0),
        ("<answer>sNaN</answer>", 0.0),
        ("<answer>1e999999999</answer>", 0.0),
        ("<answer>\uff11\uff13</answer>", 0.0),  # full-width digits
        ("<answer>\U0001f600</answer>", 0.0),
        ("<answer>\x00\ud800</answer>", 0.0),
        ("<answer>" + "1" * 10**6 + "</answer>", 0.0),
        ("<answer>" + "0" * 10**6 + "13</answer>", 0.0),
        ("<answer>" * 10**5, 0.0),
        ("13", 0.0),
        ("", 0.0),
    ],
)
def test_grade(task, text, reward):
    assert task.grade([(PROMPT, text)])[0].reward == reward


def test_verdicts_keep_their_order_and_name_the_answer(task):
    texts = ["<answer>013</answer>", "no answer", "<answer>12</answer>"]
    verdicts = task.grade([(PROMPT, text) for text in texts])
    assert [(verdict.outcome, verdict.parsed) for verdict in verdicts] == [
        ("right", "13"),
        ("unparsed", None),
        ("wrong", "12"),
    ]


def test_equal_wrong_answers_have_equal_names(task):
    texts = [f"<answer>{answer}</answer>" for answer in ("12", "+12", "012", "12.0", " 12 ")]
    assert {task.grade([(PROMPT, text)])[0].parsed for text in texts} == {"12"}
    others = [f"<answer>{answer}</answer>" for answer in ("-4", "12.5", "12 apples", "twelve")]
    verdicts = [task.grade([(PROMPT, text)])[0].parsed for text in others]
    assert verdicts == ["-4", "12.5", "12 apples", "twelve"]


@pytest.mark.parametrize(
    ("text", "outcome", "parsed"),
    [
        (r"6+7=13;13-8=5;5+8=13;\boxed{13}", "right", "13"),
        (r"\boxed{ +13 }", "right", "13"),
        (r"\boxed{3} or rather \boxed{13}", "right", "13"),
        (r"\boxed{13} or rather \boxed{3}", "wrong", "3"),
        (r"\boxed{013}\boxed{", "right", "13"),
        (r"\boxed{-013}", "wrong", "-13"),
        (r"\boxed{the answer is 13}", "wrong", "the answer is 13"),  # partial marks
        (r"\boxed{}", "unparsed", None),
        (r"\boxed{13", "unparsed", None),
        ("<answer>13</answer>", "unparsed", None),
        ("13", "unparsed", None),
        ("", "unparsed", None),
        (r"\boxed{" * 10**5, "unparsed", None),
        (r"\boxed{" + "1" * 10**6 + "}", "wrong", "1" * 10**6),
    ],
)
def test_boxed_verdicts(boxed_task, text, outcome, parsed):
    (verdict,) = boxed_task.grade([(PROMPT, text)])
    assert (verdict.outcome, verdict.parsed) == (outcome, parsed)


def test_boxed_questions_are_the_same_sums(task, boxed_task):
    assert boxed_task.eval_prompts()[0] == Prompt(
        id="chain_sum/eval/0",
        messages=[
            {
                "role": "user",
                "content": "State the final answer to the following arithmetic problem: "
                "0 - 2 + 9 - 8 =\nPut the answer in a box.",
            }
        ],
        answer="-1",
        metadata={
            "expression": "0 - 2 + 9 - 8",
            "num_terms": 4,
            "solution": r"0-2=-2;-2+9=7;7-8=-1;\boxed{-1}",
        },
    )
    sums = [prompt.metadata["expression"] for prompt in boxed_task.eval_prompts()]
    assert sums == [prompt.metadata["expression"] for prompt in task.eval_prompts()]


def test_the_reference_solution_is_right(task, boxed_task):
    for each in (task, boxed_task):
        prompts = [*each.eval_prompts()[:50], *map(each.train_prompt, range(50))]
        verdicts = each.grade([(prompt, prompt.metadata["solution"]) for prompt in prompts])
        assert {verdict.outcome for verdict in verdicts} == {"right"}


def test_the_fingerprint_of_the_default_task_is_the_one_it_always_had(task, boxed_task):
    assert task.fingerprint() == "751a80bc4f1ea611"
    assert boxed_task.fingerprint() != "751a80bc4f1ea611"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_terms": 5, "max_terms": 4}, "max_terms = 4 is below min_terms = 5"),
        ({"min_digits": 2}, "max_digits = 1 is below min_digits = 2"),
        ({"eval_seed": 10_000_500}, "are 500 apart"),
        ({"min_terms": 1, "max_terms": 2, "eval_size": 106}, "of the 210 questions there are"),
        ({"term": 3}, "Extra inputs"),
        ({"kind": "chain_sums"}, "chain_sum"),
        ({"eval_size": 0}, "greater than or equal to 1"),
        ({"answer_format": "box"}, "Input should be 'tags' or 'boxed'"),
    ],
)
def test_bad_configurations_are_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        ChainSumConfig(**fields)


def test_task_config_is_chosen_by_kind():
    class Run(BaseModel):
        task: TaskConfig

    run = Run.model_validate({"task": {"kind": "chain_sum", "max_terms": 9}})
    assert run.task == ChainSumConfig(max_terms=9)
    assert Run.model_validate({"task": {"max_terms": 9}}).task == ChainSumConfig(max_terms=9)
    mix = Run.model_validate({"task": {"kind": "gym", "datasets": [{"name": "gcd"}]}})
    assert mix.task == GymMixConfig(datasets=(GymDatasetConfig(name="gcd"),))
    with pytest.raises(ValidationError, match="does not match any of the expected tags"):
        Run.model_validate({"task": {"kind": "chess"}})


def test_the_configuration_imports_light():
    script = (
        "import sys, json, megatron_credit.tasks\n"
        "heavy = ('torch', 'transformers', 'reasoning_gym', 'numpy')\n"
        "print(json.dumps([name for name in heavy if name in sys.modules]))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == []
