"""Where evidence stands in a prompt, and what is cut when there is no room for it."""

from pathlib import Path

import pytest
from trainer.record_cases import rollout
from transformers import AutoTokenizer

from megatron_credit.trainer.signals.contexts import CUT, ContextWriter

MODEL = Path(__file__).parents[3] / "models" / "chain-sum-0.6m"
ASKED = [{"role": "user", "content": "2 + 5 ="}]
SYSTEM = [{"role": "system", "content": "Be brief."}]
SEVERAL = [*ASKED, {"role": "assistant", "content": "8"}, {"role": "user", "content": "No."}]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def record(tokenizer, messages=ASKED, response="3=7;", **changes):
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    response_ids = ids_of(tokenizer, response)
    return rollout(
        prompt_ids=ids_of(tokenizer, prompt),
        response_ids=response_ids,
        messages=messages,
        **changes,
    )


def written(tokenizer, text, place, *, max_positions=512, **changes):
    return ContextWriter(tokenizer, max_positions).write(record(tokenizer, **changes), text, place)


@pytest.mark.parametrize(
    ("place", "messages", "expected"),
    [
        ("answer_bare", ASKED, "<|user|>2 + 5 =<|assistant|> 7"),
        ("answer_wrapped", ASKED, "<|user|>2 + 5 =\nThe answer is 7.<|assistant|>"),
        ("user", ASKED, "<|user|>2 + 5 =\nA solution of this problem:\n7<|assistant|>"),
        (
            "system",
            ASKED,
            "<|system|>A solution of this problem:\n7<|user|>2 + 5 =<|assistant|>",
        ),
        (
            "system",
            SYSTEM + ASKED,
            "<|system|>Be brief.\n\nA solution of this problem:\n7<|user|>2 + 5 =<|assistant|>",
        ),
        (
            "user",
            SEVERAL,
            "<|user|>2 + 5 =<|assistant|>8<|end|><|user|>No.\nA solution of this problem:\n7"
            "<|assistant|>",
        ),
        (
            "answer_wrapped",
            SYSTEM + SEVERAL,
            "<|system|>Be brief.<|user|>2 + 5 =<|assistant|>8<|end|><|user|>No.\nThe answer is 7."
            "<|assistant|>",
        ),
    ],
)
def test_each_place(tokenizer, place, messages, expected):
    context = written(tokenizer, "7", place, messages=messages)
    assert tokenizer.decode(context.prompt_ids) == expected
    assert context.evidence == "7"
    assert not context.is_cut


def test_the_bare_answer_goes_behind_the_very_tokens_of_the_prompt(tokenizer):
    """Nothing of the prompt is rendered again, so ids that no text gives stay."""
    kept = record(tokenizer)
    strange = rollout(prompt_ids=[5, 5, 200, 3], response_ids=kept.response_ids)
    context = ContextWriter(tokenizer, 512).write(strange, "12", "answer_bare")
    assert context.prompt_ids == [5, 5, 200, 3, *ids_of(tokenizer, " 12")]


def test_options_of_the_template_are_those_of_the_prompt(tokenizer):
    other = AutoTokenizer.from_pretrained(MODEL)
    other.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
        "{% if not enable_thinking %}-{% endif %}"
    )
    plain = record(tokenizer, template_options={"enable_thinking": False})
    context = ContextWriter(other, 512).write(plain, "7", "answer_wrapped")
    assert other.decode(context.prompt_ids).endswith("The answer is 7.<|assistant|>-")


LONG = ";".join(f"{number}+1={number + 1}" for number in range(10, 60))


@pytest.mark.parametrize("place", ["user", "system", "answer_bare", "answer_wrapped"])
@pytest.mark.parametrize("spare", [0, 1, 2, 3, 10, 100])
def test_the_middle_of_a_long_text_is_cut(tokenizer, place, spare):
    """Never longer than the model reads, prompt and response whole."""
    empty = len(written(tokenizer, "", place).prompt_ids)
    response = ids_of(tokenizer, "3=7;")
    room = empty + len(ids_of(tokenizer, CUT)) + 8 + spare
    context = written(tokenizer, LONG, place, max_positions=room + len(response))
    assert context.is_cut
    assert room - 4 <= len(context.prompt_ids) <= room
    head, tail = context.evidence.split(CUT)
    assert LONG.startswith(head) and LONG.endswith(tail)
    assert len(head) >= 2 and abs(len(ids_of(tokenizer, head)) - len(ids_of(tokenizer, tail))) <= 2
    whole = tokenizer.decode(written(tokenizer, LONG, place).prompt_ids)
    assert tokenizer.decode(context.prompt_ids) == whole.replace(LONG, context.evidence)


def test_what_just_fits_is_not_cut(tokenizer):
    whole = written(tokenizer, LONG, "user")
    room = len(whole.prompt_ids) + len(ids_of(tokenizer, "3=7;"))
    assert written(tokenizer, LONG, "user", max_positions=room) == whole
    assert written(tokenizer, LONG, "user", max_positions=room - 1).is_cut


@pytest.mark.parametrize("place", ["user", "answer_bare"])
def test_no_room_at_all(tokenizer, place):
    empty = len(written(tokenizer, "", place).prompt_ids)
    response = len(ids_of(tokenizer, "3=7;"))
    for room in (0, 5, empty, empty + 2):
        assert written(tokenizer, LONG, place, max_positions=room + response) is None


def test_a_text_of_characters_of_several_tokens(tokenizer):
    """A cut inside a character takes more tokens to spell, and must still fit."""
    text = "\u65e5\u672c" * 30
    for room in range(40, 60):
        context = written(tokenizer, text, "user", max_positions=room)
        assert context is None or len(context.prompt_ids) + 4 <= room


def test_a_record_without_messages(tokenizer):
    bare = record(tokenizer, prompt="q", sample=3)
    without = rollout(prompt="q", sample=3, prompt_ids=bare.prompt_ids)
    writer = ContextWriter(tokenizer, 512)
    assert writer.write(without, "7", "answer_bare") is not None
    with pytest.raises(ValueError, match="rollout 3 of q was recorded without the prompt's mess"):
        writer.write(without, "7", "user")
