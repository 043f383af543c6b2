import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megatron_credit.data.config import DataConfig
from megatron_credit.tasks.dataset import DatasetTask

MODEL = Path(__file__).parents[2] / "models" / "chain-sum-0.6m"


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def build(**section):
    config = DataConfig.model_validate({"verifier_pool": {"workers": 1}} | section)
    return DatasetTask(config, tokenizer=AutoTokenizer.from_pretrained(MODEL), seed=3)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    sums = [{"prompt": f"1 + {k}", "answer": 1 + k} for k in range(8)]
    words = [{"prompt": f"{k} + 1", "answer": f"number {k}"} for k in range(50, 58)]
    return [
        {"path": write(directory / "sums.jsonl", sums), "verifier": "numeric"},
        write(directory / "words.jsonl", words),
    ]


@pytest.fixture(scope="module")
def task(sources):
    task = build(train=sources, verifier="exact", eval_size=4)
    yield task
    task.close()


def test_each_source_has_its_own_verifier(task):
    prompts = [task.train_prompt(index) for index in range(2)]
    assert [prompt.source for prompt in prompts] == ["sums", "words"]
    numeric, exact = prompts
    answers = [
        (numeric, f"<answer>{numeric.answer}.00</answer>"),
        (numeric, "<answer>77</answer>"),
        (exact, f"<answer>{exact.answer}</answer>"),
        (exact, f"<answer>{exact.answer}.00</answer>"),
    ]
    outcomes = [verdict.outcome for verdict in task.grade(answers)]
    assert outcomes == ["right", "wrong", "right", "wrong"]


def test_it_offers_what_a_task_offers(task, sources):
    assert len(task.eval_prompts()) == 4
    held_out = {prompt.messages[0]["content"] for prompt in task.eval_prompts()}
    trained = {task.train_prompt(index).messages[0]["content"] for index in range(100)}
    assert len(trained) == 12
    assert not trained & held_out
    report = json.loads(json.dumps(task.report()))
    read = {name: (numbers["read"], numbers["kept"]) for name, numbers in report["sources"].items()}
    assert read["train/sums"][0] == read["train/words"][0] == 8
    assert sum(kept for name, (_, kept) in read.items() if name.startswith("train")) == 12
    assert {prompt.source for prompt in task.longest_prompts()} == {"sums", "words"}
    again = build(train=sources, verifier="exact", eval_size=4)
    again.close()
    assert again.fingerprint() == task.fingerprint()


def test_one_source_has_no_name_and_is_graded(sources):
    task = build(train=sources[0])
    prompt = task.train_prompt(0)
    (verdict,) = task.grade([(prompt, f"The answer is {prompt.answer}.")])
    task.close()
    assert prompt.source == ""
    assert verdict.outcome == "right"


def test_a_reference_that_the_verifier_cannot_read_is_a_malformed_row(tmp_path):
    rows = [{"prompt": "1 + 1", "answer": 2}, {"prompt": "1 + 2", "answer": "many"}]
    train = write(tmp_path / "x.jsonl", rows)
    with pytest.raises(ValueError, match=r"x\.jsonl, row 2: answer the verifier cannot read: .*ma"):
        build(train=train, verifier="numeric")
    task = build(train=train, verifier="numeric", on_bad_row="skip")
    task.close()
    assert task.report()["sources"]["train/x"]["left_out"] == {"answer the verifier cannot read": 1}
    assert [task.train_prompt(index).answer for index in range(2)] == ["2", "2"]
