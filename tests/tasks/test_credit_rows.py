from random import Random

import pytest

from megatron_credit.batch.evidence_text import (
    answer_below,
    bare_answer,
    solution_below,
    system_solution,
)
from megatron_credit.tasks.chain_sum import ChainSum
from megatron_credit.tasks.credit_figures import EASY, HARD, LONG
from megatron_credit.tasks.credit_model import PHASES, credit_rows, held_out_questions
from megatron_credit.tasks.credit_rows import CreditRowConfig, answer_of, make_credit_turns
from megatron_credit.tasks.solver import ask_for_box, first_wrong_step
from megatron_credit.tasks.tokenizer import build_credit_tokenizer
from megatron_credit.tasks.warm_start_rows import Turn, encode

QUESTION = "State the final answer to the following arithmetic problem: 6 + 7 - 8 ="
BOXED = f"{QUESTION}\nPut the answer in a box."
EXACT = "6+7=13;13-8=5;<answer>5</answer>"
# every carry forgotten
WRONG = "6+7=3;3-8=-5;<answer>-5</answer>"
NONE = {f"{kind}_share": 0.0 for kind in ("retry", "solution", "answer", "boxed", "probe", "stray")}


@pytest.fixture(scope="module")
def tokenizer():
    return build_credit_tokenizer()


def turns(rng=None, **fields):
    """A chat where every carry is forgotten and evidence is always followed."""
    config = CreditRowConfig(**NONE | {"forget": 1.0, "boxed_evidence_share": 0.0} | fields)
    return make_credit_turns(QUESTION, config, rng or Random(0))


def many(count=200, **fields):
    rng = Random(0)
    return [turns(rng, **fields) for _ in range(count)]


def asked(content):
    return Turn(f"<|user|>{content}<|assistant|>", False)


def given(text):
    return Turn(f"{text}<|end|>", True)


def test_plain_row():
    assert turns() == [asked(QUESTION), given(WRONG)]


def test_retry_row():
    again = Turn("<|user|>Wrong, try again.<|assistant|>", False)
    assert turns(retry_share=1.0) == [
        asked(QUESTION), given(WRONG), again, given(WRONG), again, given(WRONG),
    ]  # fmt: skip


def test_solution_rows_show_both_signs_in_both_turns():
    guide = "A solution of this problem:"
    chats = many(solution_share=1.0)
    expected = [[asked(f"{QUESTION}\n{guide}\n{text}"), given(text)] for text in (EXACT, WRONG)] + [
        [
            Turn(f"<|system|>{guide}\n{text}<|user|>{QUESTION}<|assistant|>", False),
            given(text),
        ]
        for text in (EXACT, WRONG)
    ]
    counts = [chats.count(chat) for chat in expected]
    assert sum(counts) == 200
    assert min(counts) > 25  # 50 expected, four standard errors below


def test_answer_rows_are_bare_or_wrapped():
    chats = many(answer_share=1.0)
    bare = [
        [asked(QUESTION), Turn(f" {answer}", False), given(text)]
        for answer, text in (("5", EXACT), ("-5", WRONG))
    ]
    wrapped = [
        [asked(f"{QUESTION}\nThe answer is {answer}."), given(text)]
        for answer, text in (("5", EXACT), ("-5", WRONG))
    ]
    counts = [chats.count(chat) for chat in bare + wrapped]
    assert sum(counts) == 200
    assert 100 < sum(counts[:2]) < 160  # two thirds
    assert min(counts) > 15


def test_boxed_row():
    assert turns(boxed_share=1.0) == [asked(BOXED), given(r"6+7=3;3-8=-5;\boxed{-5}")]


def test_probe_rows_train_what_stands_in_the_box():
    chats = many(probe_share=1.0)
    expected = [
        [asked(BOXED), Turn(rf"{thought}\boxed{{", False), Turn("-5}", True)]
        for thought in ("", "6+7=3;")
    ]
    counts = [chats.count(chat) for chat in expected]
    assert sum(counts) == 200
    assert min(counts) > 60


def test_evidence_rows_may_ask_for_a_box():
    boxed = {"exact_share": 0.0, "boxed_evidence_share": 1.0}
    text = r"6+7=3;3-8=-5;\boxed{-5}"
    for chat in many(50, solution_share=1.0, **boxed):
        assert chat[0].text.count("Put the answer in a box.") == 1
        assert chat[0].text.count(text) == 1
        assert chat[1] == given(text)
    for chat in many(50, answer_share=1.0, **boxed):
        assert BOXED in chat[0].text
        assert chat[-1] == given(text)


def test_stray_rows_do_not_follow_their_evidence():
    chats = many(solution_share=1.0, stray_share=1.0, exact_share=1.0)
    assert {chat[-1] for chat in chats} == {given(WRONG)}
    assert all(EXACT in chat[0].text for chat in chats)
    rate = sum(chat[-1] == given(WRONG) for chat in many(1000, solution_share=1.0, stray_share=0.1))
    # half of the rows show the pupil's solution; of the exact ones a tenth stray
    assert rate / 1000 == pytest.approx(0.55, abs=0.07)


def test_a_departure_may_be_left_out_of_the_lesson():
    """Where the given solution leaves the shown one; before and behind, the model is taught."""
    question = "State the final answer to the following arithmetic problem: 1 + 1 + 9 - 3 ="
    config = CreditRowConfig(
        **NONE
        | {"forget": 1.0, "boxed_evidence_share": 0.0, "exact_share": 1.0, "solution_share": 1.0}
        | {"stray_share": 1.0, "teach_departure": False}
    )
    chat = make_credit_turns(question, config, Random(0))
    assert "1+1=2;2+9=11;11-3=8;<answer>8</answer>" in chat[0].text
    assert chat[1:] == [
        Turn("1+1=2;", True),
        Turn("2+9=1;", False),
        Turn("1-3=-2;<answer>-2</answer><|end|>", True),
    ]
    follows = config.model_copy(update={"forget": 0.0})
    chat = make_credit_turns(question, follows, Random(0))
    assert chat[1:] == [given("1+1=2;2+9=11;11-3=8;<answer>8</answer>")]


def test_the_mixture_has_its_shares():
    rng, config = Random(0), CreditRowConfig(stray_share=0.0)
    chats = [make_credit_turns(QUESTION, config, rng) for _ in range(4000)]
    kinds = [kind_of(chat) for chat in chats]
    shares = {kind: kinds.count(kind) / 4000 for kind in sorted(set(kinds))}
    # A retry row shows no second attempt where the first is right. That needs the carry of 6 + 7
    # and the borrow of 13 - 8; 3 - 8 has none that could be forgotten.
    right_at_once = 0.1 * 0.3 * 0.3
    assert shares == pytest.approx(
        {
            "answer": 0.15,
            "boxed": 0.1,
            "plain": 0.4 + right_at_once,
            "probe": 0.05,
            "retry": 0.1 - right_at_once,
            "solution": 0.2,
        },
        abs=0.035,
    )


def kind_of(chat):
    context = "".join(turn.text for turn in chat if not turn.trained)
    if "Wrong, try again." in context:
        return "retry"
    if "A solution of this problem:" in context:
        return "solution"
    if "The answer is" in context or not context.endswith(("<|assistant|>", "{")):
        return "answer"
    if chat[-1].text.endswith("<|end|>"):
        return "boxed" if "box" in context else "plain"
    return "probe"


def test_rows_are_encoded_as_the_trainer_encodes_contexts(tokenizer):
    """A response has the same token ids behind each context, and a chat is its turns end to end."""
    plain = encode([asked(QUESTION), given(EXACT)], tokenizer)
    response = [token for token in plain.labels if token != -100]
    chats = [
        [{"role": "user", "content": solution_below(QUESTION, WRONG)}],
        [
            {"role": "system", "content": system_solution(WRONG)},
            {"role": "user", "content": QUESTION},
        ],
        [{"role": "user", "content": answer_below(QUESTION, "-5")}],
        [{"role": "user", "content": ask_for_box(QUESTION)}],
    ]
    for chat in chats:
        context = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        row = encode([Turn(context, False), given(EXACT)], tokenizer)
        assert row.token_ids == ids + response
        assert row.labels == [-100] * len(ids) + response
        assert tokenizer.decode(row.token_ids) == f"{context}{EXACT}<|end|>"
    bare = encode(
        [asked(QUESTION), Turn(bare_answer("-5"), False), given(EXACT)], tokenizer
    ).token_ids
    prompt = plain.token_ids[: -len(response)]
    assert bare == prompt + tokenizer(" -5")["input_ids"] + response


def test_a_probe_is_a_boxed_response_cut_short(tokenizer):
    chat = [asked(BOXED), Turn("6+7=3;" + r"\boxed{", False), Turn("-5}", True)]
    row = encode(chat, tokenizer)
    written = encode([asked(BOXED), given(r"6+7=3;\boxed{-5}")], tokenizer)
    assert row.token_ids == written.token_ids[:-1]
    assert tokenizer.decode([token for token in row.labels if token != -100]) == "-5}"


@pytest.mark.parametrize("phase", PHASES)
def test_no_row_asks_a_held_out_question(phase, tokenizer):
    held_out = held_out_questions()
    assert len(held_out) == 3 * 256
    for config in (EASY, LONG, HARD):
        assert {p.messages[0]["content"] for p in ChainSum(config).eval_prompts()} <= held_out
    rows = credit_rows(phase, Random(0))
    chats = [tokenizer.decode(rows.next_row().token_ids) for _ in range(1500)]
    questions = {"State" + chat.split("State")[1].split("=")[0] + "=" for chat in chats}
    assert len(questions) > 1450
    assert not questions & held_out
    sizes = {question.count(" + ") + question.count(" - ") + 1 for question in questions}
    assert sizes == set(range(4, phase.max_terms + 1))


def test_held_out_questions_are_skipped_not_asked(monkeypatch):
    rows = credit_rows(PHASES[0], Random(0))
    first = rows.next_row()
    asked_first = ChainSum(EASY.model_copy(update={"seed": PHASES[0].seed})).train_prompt(0)
    monkeypatch.setattr(
        "megatron_credit.tasks.credit_model.held_out_questions",
        lambda: frozenset([asked_first.messages[0]["content"]]),
    )
    assert credit_rows(PHASES[0], Random(0)).next_row() != first


def test_rows_are_the_same_every_time():
    first, again = (credit_rows(PHASES[1], Random(3)) for _ in range(2))
    assert [first.next_row() for _ in range(50)] == [again.next_row() for _ in range(50)]


def test_answer_of():
    assert answer_of(EXACT) == "5"
    assert answer_of(r"6+7=3;3-8=-5;\boxed{-5}") == "-5"


def test_first_wrong_step_of_a_boxed_solution():
    assert first_wrong_step(r"6+7=13;13-8=5;\boxed{5}", BOXED) is None
    assert first_wrong_step(r"6+7=3;3-8=-5;\boxed{-5}", BOXED) == 0
    assert first_wrong_step(r"6+7=13;13-8=5;\boxed{4}", BOXED) == 2
    assert first_wrong_step(EXACT, BOXED) == 2  # not the form that was asked for
