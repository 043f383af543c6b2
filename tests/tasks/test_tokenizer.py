import pytest

from megatron_credit.batch.evidence_text import (
    ANSWER_IS,
    GUIDE,
    RETRY,
    answer_below,
    bare_answer,
    solution_below,
    system_solution,
)
from megatron_credit.tasks.chain_sum import ChainSum, ChainSumConfig
from megatron_credit.tasks.solver import ASK_FOR_BOX, OPEN_BOX, ask_for_box
from megatron_credit.tasks.tokenizer import (
    ASSISTANT,
    END_ID,
    PAD_ID,
    QUESTION_OPENING,
    SYSTEM,
    USER,
    VOCAB_SIZE,
    build_credit_tokenizer,
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


CREDIT_TEXTS = [
    (GUIDE, "A solution of this problem:"),
    (ANSWER_IS, "The answer is"),
    (RETRY, "Wrong, try again."),
    (ASK_FOR_BOX, "Put the answer in a box."),
    (QUESTION_OPENING, "State the final answer to the following arithmetic problem:"),
    (SYSTEM, "<|system|>"),
    (OPEN_BOX, r"\boxed{"),
]


@pytest.fixture(scope="module")
def credit_tokenizer():
    return build_credit_tokenizer()


@pytest.mark.parametrize(("sentence", "spelling"), CREDIT_TEXTS)
def test_each_fixed_sentence_is_one_token_of_the_credit_model(credit_tokenizer, sentence, spelling):
    assert sentence == spelling
    (token,) = credit_tokenizer(sentence)["input_ids"]
    assert credit_tokenizer.decode([token]) == spelling


def test_the_credit_tokenizer_reads_questions_like_the_other(credit_tokenizer, tokenizer):
    for text in (QUESTION, SOLUTION, f"{USER}{QUESTION}{ASSISTANT}{SOLUTION}<|end|>"):
        pieces = [
            [each.decode([token]) for token in each(text)["input_ids"]]
            for each in (credit_tokenizer, tokenizer)
        ]
        assert pieces[0] == pieces[1]


def test_evidence_in_the_user_turn(credit_tokenizer):
    text = answer_below(ask_for_box("6 + 7 ="), "-13")
    pieces = [credit_tokenizer.decode([token]) for token in credit_tokenizer(text)["input_ids"]]
    assert pieces == [
        "6", " +", " 7", " =", "\n", "Put the answer in a box.",
        "\n", "The answer is", " -", "1", "3", ".",
    ]  # fmt: skip
    text = solution_below("6 + 7 =", r"6+7=13;\boxed{13}")
    pieces = [credit_tokenizer.decode([token]) for token in credit_tokenizer(text)["input_ids"]]
    assert pieces == [
        "6", " +", " 7", " =", "\n", "A solution of this problem:", "\n",
        "6", "+", "7", "=", "1", "3", ";", "\\boxed{", "1", "3", "}",
    ]  # fmt: skip


def test_a_bare_answer_cannot_be_mistaken_for_the_response_behind_it(credit_tokenizer):
    pieces = [
        [credit_tokenizer.decode([token]) for token in credit_tokenizer(text)["input_ids"]]
        for text in (bare_answer("-13"), bare_answer("13"), "13")
    ]
    assert pieces == [[" -", "1", "3"], [" 1", "3"], ["1", "3"]]


def test_the_credit_chat_template_has_a_system_turn(credit_tokenizer):
    messages = [
        {"role": "system", "content": system_solution(SOLUTION)},
        {"role": "user", "content": QUESTION},
    ]
    text = credit_tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    assert text == (
        f"<|system|>A solution of this problem:\n{SOLUTION}<|user|>{QUESTION}<|assistant|>"
    )


@pytest.mark.parametrize(
    "text", [QUESTION, SOLUTION, RETRY, "", " ", "a  b\n", "12 345 - 6", "}{\\boxed", "caf\u00e9"]
)
def test_decoding_with_the_credit_tokenizer_gives_the_text_back(credit_tokenizer, text):
    assert credit_tokenizer.decode(credit_tokenizer(text)["input_ids"]) == text


def test_every_credit_id_is_a_row_of_the_embedding(credit_tokenizer):
    assert max(credit_tokenizer.get_vocab().values()) < VOCAB_SIZE
    assert (credit_tokenizer.pad_token_id, credit_tokenizer.eos_token_id) == (PAD_ID, END_ID)
    assert credit_tokenizer.model_max_length == 1024
    special = credit_tokenizer(f"{SYSTEM}{USER}{ASSISTANT}<|end|>")["input_ids"]
    assert credit_tokenizer.decode(special, skip_special_tokens=True) == ""
