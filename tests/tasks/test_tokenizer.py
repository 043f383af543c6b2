import pytest

from megatron_credit.tasks.chain_sum import ChainSum, ChainSumConfig
from megatron_credit.tasks.tokenizer import (
    ASSISTANT,
    END_ID,
    PAD_ID,
    RETRY,
    USER,
    VOCAB_SIZE,
    build_tokenizer,
)

QUESTION = "State the final answer to the following arithmetic problem: 6 + 7 - 8 + 9 ="
SOLUTION = "6+7=13;13-8=5;5-9=-4;<answer>-4</answer>"


@pytest.fixture(scope="module")
def tokenizer():
    task = ChainSum(ChainSumConfig())
    return build_tokenizer(task.train_prompt(index).messages[0]["content"] for index in range(200))


def chat_ids(tokenizer, *contents):
    roles = ("user", "assistant", "user")
    messages = [
        {"role": role, "content": content} for role, content in zip(roles, contents, strict=False)
    ]
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=len(contents) != 2, return_dict=False
    )


def test_a_question_of_four_terms_is_eleven_tokens(tokenizer):
    ids = chat_ids(tokenizer, QUESTION)
    assert [tokenizer.decode([token]) for token in ids] == [
        "<|user|>",
        "State the final answer to the following arithmetic problem:",
        " 6", " +", " 7", " -", " 8", " +", " 9", " =",
        "<|assistant|>",
    ]  # fmt: skip


def test_a_solution_is_one_token_for_each_digit_sign_and_tag(tokenizer):
    ids = tokenizer(SOLUTION)["input_ids"]
    pieces = [tokenizer.decode([token]) for token in ids]
    assert pieces[:7] == ["6", "+", "7", "=", "1", "3", ";"]
    assert pieces[-4:] == ["<answer>", "-", "4", "</answer>"]
    assert len(ids) == len("6+7=13;13-8=5;5-9=-4;-4") + 2


def test_a_chat_is_its_turns_end_to_end(tokenizer):
    turns = [f"{USER}{QUESTION}{ASSISTANT}", SOLUTION + "<|end|>", f"{USER}{RETRY}{ASSISTANT}"]
    separately = [token for turn in turns for token in tokenizer(turn)["input_ids"]]
    assert chat_ids(tokenizer, QUESTION, SOLUTION, RETRY) == separately
    assert len(tokenizer(turns[2])["input_ids"]) == 3
    assert chat_ids(tokenizer, QUESTION, SOLUTION)[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    "text", [QUESTION, SOLUTION, RETRY, "", " ", "a  b\n", "12 345 - 6", "caf\u00e9 \U0001f600"]
)
def test_decoding_gives_the_text_back(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_answer_tags_survive_the_removal_of_special_tokens(tokenizer):
    ids = tokenizer(SOLUTION + "<|end|><|pad|>")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == SOLUTION


def test_every_id_is_a_row_of_the_embedding(tokenizer):
    assert max(tokenizer.get_vocab().values()) < VOCAB_SIZE
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (PAD_ID, END_ID) == (0, 1)
