from decimal import Decimal

import pytest

from megatron_credit.data.config import ColumnsConfig
from megatron_credit.data.problems import RowProblem
from megatron_credit.data.rows import Row, parse_row

USER = {"role": "user", "content": "1 + 1"}


def parsed(raw, *, system_prompt=None, **columns):
    return parse_row(raw, ColumnsConfig(**columns), system_prompt)


def test_a_text_becomes_the_users_message():
    raw = {"prompt": "1 + 1", "answer": "2", "id": 7, "metadata": {"a": [1]}, "more": object()}
    assert parsed(raw) == Row("7", [USER], "2", {"a": [1]})


def test_messages_keep_role_and_content():
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, USER]
    with_nulls = [message | {"name": None} for message in chat]
    assert parsed({"messages": with_nulls, "answer": "2"}) == Row(None, chat, "2", {})
    assert parsed({"prompt": chat, "answer": "2", "messages": None}).messages == chat


def test_columns_are_mapped_and_nested_ones_are_reached():
    raw = {"q": "1 + 1", "reward": {"truth": 2}, "level": 3, "a.b": "x", "info": '{"k": null}'}
    columns = {"prompt": "q", "messages": "", "answer": "reward.truth"}
    assert parsed(raw, **columns, metadata=("level", "a.b")).metadata == {"level": 3, "a.b": "x"}
    assert parsed(raw, **columns, metadata="info") == Row(None, [USER], "2", {"k": None})
    assert parsed(raw, **columns, id="a.b").id == "x"


def test_no_answer_no_id_and_no_metadata_where_the_columns_say_so():
    raw = {"prompt": "1 + 1", "id": [], "metadata": 3}
    assert parsed(raw, answer="", id="", metadata="") == Row(None, [USER], "", {})


def test_the_system_prompt_comes_first():
    messages = parsed({"prompt": "1 + 1", "answer": 2}, system_prompt="Think.").messages
    assert messages == [{"role": "system", "content": "Think."}, USER]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("2", "2"),
        (" 2\n", " 2\n"),
        (2, "2"),
        (-2, "-2"),
        (10**30, "1" + "0" * 30),
        (2.0, "2"),
        (0.1, "0.1"),
        (1e300, "1e+300"),
        (Decimal("2.50"), "2.50"),
    ],
)
def test_answers_are_text_or_numbers(value, text):
    assert parsed({"prompt": "1 + 1", "answer": value}).answer == text


@pytest.mark.parametrize(
    ("change", "reason", "message"),
    [
        ({"prompt": ...}, "missing column", r"'prompt' nor 'messages'; the row has \['answer'\]"),
        ({"prompt": None}, "empty prompt", "null in 'prompt'$"),
        ({"prompt": None, "messages": None}, "empty prompt", "null in 'prompt' and 'messages'"),
        ({"prompt": " \n"}, "empty prompt", r"it is ' \\n'"),
        ({"prompt": 3}, "bad messages", "not the int 3"),
        ({"messages": "x"}, "two prompts", "both 'prompt' and 'messages' are filled"),
        ({"prompt": None, "messages": "x"}, "bad messages", "not the text 'x'"),
        ({"prompt": []}, "empty prompt", "list of messages is empty"),
        ({"prompt": ["x"]}, "bad messages", "message 1 is the text 'x', not an object"),
        ({"prompt": [{}]}, "bad messages", "message 1 has the role None, not one of system"),
        ({"prompt": [USER | {"role": "tool"}]}, "bad messages", "role 'tool'"),
        ({"prompt": [USER | {"role": []}]}, "bad messages", r"role \[\]"),
        ({"prompt": [USER | {"content": None}]}, "bad messages", "has null as its content"),
        ({"prompt": [USER | {"content": [{"text": "a"}]}]}, "bad messages", "has a list"),
        ({"prompt": [USER | {"content": ""}]}, "empty prompt", "message 1 has no content"),
        ({"prompt": [USER | {"tool_calls": [1]}]}, "bad messages", r"has \['tool_calls'\]"),
        ({"prompt": [USER, USER | {"role": "assistant"}]}, "bad messages", "last one is by ass"),
        ({"answer": ...}, "missing column", "'answer'; the row has"),
        ({"answer": None}, "missing answer", "it is null"),
        ({"answer": " "}, "missing answer", "it is ' '"),
        ({"answer": True}, "answer of another type", "not the boolean True"),
        ({"answer": [2]}, "answer of another type", r"not a list \[2\]"),
        ({"answer": {"a": 2}}, "answer of another type", "not an object"),
        ({"answer": float("nan")}, "answer of another type", "the float nan"),
        ({"answer": float("inf")}, "answer of another type", "the float inf"),
        ({"answer": b"2"}, "answer of another type", "the bytes b'2'"),
        ({"id": True}, "bad id", "the boolean True"),
        ({"id": 1.5}, "bad id", "the float 1.5"),
        ({"id": ""}, "bad id", "the text ''"),
        ({"metadata": 3}, "bad metadata", "expected an object, not the int 3"),
        ({"metadata": "[1]"}, "bad metadata", "expected an object, not a list"),
        ({"metadata": "{"}, "bad metadata", "'{' is no JSON"),
        ({"metadata": "[" * 10**5}, "bad metadata", "is no JSON: maximum recursion depth"),
    ],
)
def test_malformed_rows_say_what_is_wrong(change, reason, message):
    raw = {"prompt": "1 + 1", "answer": 2} | change
    raw = {name: value for name, value in raw.items() if value is not ...}
    with pytest.raises(RowProblem, match=message) as caught:
        parsed(raw)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"id": "uid"}, "'uid'; the row has"),
        ({"metadata": "extra"}, "'extra'; the row has"),
        ({"metadata": ("level",)}, "'level'; the row has"),
        ({"answer": "reward.truth"}, "'reward.truth'; the row has"),
        ({"answer": "prompt.truth"}, "'prompt.truth'; the row has"),
    ],
)
def test_a_column_that_was_named_must_exist(columns, message):
    with pytest.raises(RowProblem, match=message) as caught:
        parsed({"prompt": "1 + 1", "answer": 2, "reward": None}, **columns)
    assert caught.value.reason == "missing column"


def test_two_system_messages_are_refused():
    chat = [{"role": "system", "content": "x"}, USER]
    with pytest.raises(RowProblem, match=r"and data\.system_prompt adds one"):
        parsed({"prompt": chat, "answer": 2}, system_prompt="Think.")
