import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_credit.tasks.accuracy import measure_accuracy
from megatron_credit.tasks.chain_sum import ChainSum
from megatron_credit.tasks.credit_figures import (
    EASY,
    LONG,
    measure_attempts,
    measure_copying,
    wrong_responses,
)
from megatron_credit.tasks.evidence_share import measure_evidence_shares
from megatron_credit.tasks.sample import logprobs
from megatron_credit.tasks.tokenizer import build_credit_tokenizer

MODEL = Path(__file__).parents[2] / "models" / "chain-sum-credit"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def card_row(start):
    """Numbers of the model card's table row that begins with `start`."""
    (line,) = [
        line for line in (MODEL / "README.md").read_text().splitlines() if line.startswith(start)
    ]
    return [float(number) for number in re.findall(r"\d+\.\d+", line)]


def test_configuration_is_that_of_the_other_model_but_for_the_length():
    config, other = (
        json.loads((directory / "config.json").read_text())
        for directory in (MODEL, MODEL.parent / "chain-sum-0.6m")
    )
    assert config.pop("max_position_embeddings") == 1024
    assert other.pop("max_position_embeddings") == 512
    assert config == other


def test_weights_are_tied_and_fp32():
    with safe_open(MODEL / "model.safetensors", "pt") as weights:
        names = set(weights.keys())
        assert "lm_head.weight" not in names
        assert all(weights.get_tensor(name).dtype == torch.float32 for name in names)
        assert all(weights.get_tensor(name).isfinite().all() for name in names)
        assert sum(weights.get_tensor(name).numel() for name in names) == 640_384


def test_the_tokenizer_is_rebuilt_bit_for_bit(tmp_path):
    build_credit_tokenizer().save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / name).read_text() == (MODEL / name).read_text()


@pytest.mark.parametrize(("config", "row"), [(EASY, "| 4-6 |"), (LONG, "| 7-9 |")])
def test_it_is_as_often_right_as_its_card_says(model, tokenizer, config, row):
    right, _, boxed, well_formed, _, _ = card_row(row)
    task = ChainSum(config)
    prompts = task.eval_prompts()[:64]
    found = measure_accuracy(
        model, tokenizer, task, prompts, temperature=1.0, seed=3, max_new_tokens=110
    )
    assert found.right == pytest.approx(right, abs=0.25)  # four standard errors of 64
    assert found.well_formed >= well_formed - 0.05
    task = ChainSum(config.model_copy(update={"answer_format": "boxed"}))
    found = measure_accuracy(
        model, tokenizer, task, task.eval_prompts()[:64], temperature=1.0, max_new_tokens=110
    )
    assert found.right == pytest.approx(boxed, abs=0.25)
    assert found.well_formed >= 0.95


def test_signals_point_at_the_first_wrong_step(model, tokenizer):
    wrong = wrong_responses((model, tokenizer), EASY, num_prompts=64)
    shares = measure_evidence_shares(model, tokenizer, wrong)
    # the card has 0.78 to 0.89; these are about thirty responses
    assert min(shares[:4]) > 0.6
    assert shares.uniform < 0.3


def test_it_gives_again_what_it_is_shown(model, tokenizer):
    for in_system_turn in (False, True):
        found = measure_copying((model, tokenizer), in_system_turn=in_system_turn, num_prompts=32)
        assert found > 0.7


def test_it_tries_again(model, tokenizer):
    first, second, *_ = measure_attempts((model, tokenizer), num_prompts=48)
    assert first.num_reached == 48
    assert second.num_reached == 48 - round(48 * first.right)
    assert 0 < second.right < first.right
    assert 0 < second.repeated < 1


def test_the_box_holds_the_last_result(model, tokenizer):
    context = tokenizer(
        "<|user|>State the final answer to the following arithmetic problem: 1 + 2 + 3 + 1 =\n"
        r"Put the answer in a box.<|assistant|>1+2=3;3+3=6;6+1=7;\boxed{"
    )["input_ids"]
    (logprob_TV,) = logprobs(model, [context], [tokenizer("7}")["input_ids"]])
    likeliest = [tokenizer.decode([token]) for token in logprob_TV.argmax(-1).tolist()]
    assert likeliest == ["7", "}"]


def test_the_readme_says_how_it_was_made_and_what_it_reaches():
    readme = (MODEL / "README.md").read_text()
    assert "--preset credit --out models/chain-sum-credit --steps 1000 --seed 1" in readme
    # a share of the tokens would be 0.23
    for signal, share in (("KL(with evidence, plain)", 0.8), ("difference of log p", 0.75)):
        rows = [line.split("|") for line in readme.splitlines() if line.startswith(f"| {signal} |")]
        assert len(rows) == 2
        assert min(float(row[3]) for row in rows) >= share
