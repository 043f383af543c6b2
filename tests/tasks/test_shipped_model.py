import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_credit.tasks.accuracy import measure_accuracy
from megatron_credit.tasks.chain_sum import ChainSum, ChainSumConfig
from megatron_credit.tasks.tokenizer import build_tokenizer
from megatron_credit.tasks.warm_start import QUESTION_SEED, TOKENIZER_QUESTIONS

MODEL = Path(__file__).parents[2] / "models" / "chain-sum-0.6m"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def test_configuration():
    config = json.loads((MODEL / "config.json").read_text())
    expected = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 384,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "dtype": "float32",
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    assert {name: config[name] for name in expected} == expected
    generation = json.loads((MODEL / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (1, 0)


def test_weights_are_tied_and_fp32():
    with safe_open(MODEL / "model.safetensors", "pt") as weights:
        names = set(weights.keys())
        assert "lm_head.weight" not in names
        assert weights.get_tensor("model.embed_tokens.weight").shape == (384, 128)
        assert all(weights.get_tensor(name).dtype == torch.float32 for name in names)
        assert all(weights.get_tensor(name).isfinite().all() for name in names)
        assert sum(weights.get_tensor(name).numel() for name in names) == 640_384


def test_tokenizer_agrees_with_the_model(tokenizer):
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert max(tokenizer.get_vocab().values()) < 384
    prompt = ChainSum(ChainSumConfig()).eval_prompts()[0]
    ids = tokenizer.apply_chat_template(
        prompt.messages, add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.decode(ids) == (
        "<|user|>State the final answer to the following arithmetic problem: 0 - 2 + 9 - 8 ="
        "<|assistant|>"
    )
    assert len(ids) == 11


def test_the_tokenizer_is_rebuilt_bit_for_bit(tmp_path):
    task = ChainSum(ChainSumConfig(seed=QUESTION_SEED))
    questions = [task.train_prompt(i).messages[0]["content"] for i in range(TOKENIZER_QUESTIONS)]
    build_tokenizer(questions).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / name).read_text() == (MODEL / name).read_text()


def test_it_answers_in_the_right_form_and_is_sometimes_right(model, tokenizer):
    task = ChainSum(ChainSumConfig())
    prompts = task.eval_prompts()[:32]
    accuracy = measure_accuracy(model, tokenizer, task, prompts, temperature=1.0, seed=0)
    assert accuracy.well_formed >= 0.9
    # right about half of the time: neither broken nor leaving nothing to learn (5 standard errors)
    assert 0.06 < accuracy.right < 0.94


def test_greedy_answer_is_the_pupils(model, tokenizer):
    question = "State the final answer to the following arithmetic problem: 1 + 2 + 3 + 1 ="
    messages = [{"role": "user", "content": question}]
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    response_BL = model.generate(**encoded, max_new_tokens=40, do_sample=False)
    text = tokenizer.decode(response_BL[0, encoded["input_ids"].shape[1] :])
    assert text == "1+2=3;3+3=6;6+1=7;<answer>7</answer><|end|>"


def test_the_readme_says_how_it_was_made():
    readme = (MODEL / "README.md").read_text()
    assert "python -m megatron_credit.tasks.warm_start" in readme
    assert "640,384 parameters" in readme
