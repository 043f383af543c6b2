"""Whole loads: formats, filters, leaks, order and fingerprints, with the shipped tokenizer."""

import json
import shutil
from collections import Counter

import pyarrow as pa
import pytest
from pyarrow import parquet

from megatron_credit.data.chat import encode_prompt, template_options
from megatron_credit.data.config import DataConfig
from megatron_credit.data.load import load_data
from megatron_credit.data.store import question_hash

CHAT = [
    {"role": "user", "content": "1 + 1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "1 + 2"},
]


def ids(data, count, start=0):
    return [data.train_prompt(index).id for index in range(start, start + count)]


def left_out(data):
    return {source.split: source.left_out for source in data.report.sources}


def save(table, path):
    """Writes the table in the form that the path's name says; stream.arrow is datasets' form."""
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=7)
    elif path.stem == "stream":
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    return str(path)


@pytest.mark.parametrize("name", ["a.parquet", "stream.arrow", "file.arrow"])
def test_binary_formats_hold_the_same_prompts_as_lines(load, write, tmp_path, name):
    rows = [
        {"messages": CHAT, "answer": k, "id": f"r{k}", "metadata": {"level": k % 3}, "x": b"\xff"}
        for k in range(20)
    ]
    path = save(pa.Table.from_pylist(rows), tmp_path / name)
    lines = write("lines.jsonl", [{k: v for k, v in row.items() if k != "x"} for row in rows])
    binary = load(train={"path": path, "name": "s"})
    text = load(train={"path": lines, "name": "s"})
    found = [binary.train_prompt(index) for index in range(20)]
    assert found == [text.train_prompt(index) for index in range(20)]
    prompt = min(found, key=lambda prompt: int(prompt.answer))
    assert (prompt.id, prompt.messages, prompt.answer) == ("s/r0", CHAT, "0")
    assert (prompt.metadata, prompt.source) == ({"level": 0}, "")


def test_a_json_array_and_json_lines_under_the_same_ending(load, write, sums):
    array = load(train=write("a/x.json", json.dumps(sums(range(3)), indent=1).encode()))
    lines = load(train=write("b/x.json", sums(range(3))))
    assert ids(array, 3) == ids(lines, 3)
    assert set(ids(array, 3)) == {"x/1", "x/2", "x/3"}


def test_lines_as_they_come_from_other_systems(load, write):
    content = (
        b'\xef\xbb\xbf{"prompt": "a", "answer": 1}\r\n'
        b'\r\n{"prompt": "b", "answer": "1"}\r\n   \n{"prompt": "c\xe2\x80\xa8d", "answer": 1.5}'
    )
    data = load(train=write("x.jsonl", content))
    prompts = {prompt.id: prompt for prompt in map(data.train_prompt, range(3))}
    assert {name: prompt.answer for name, prompt in prompts.items()} == {
        "x/1": "1",
        "x/3": "1",
        "x/5": "1.5",
    }
    assert prompts["x/5"].messages[0]["content"] == "c\u2028d"


def test_files_of_a_pattern_are_one_source(load, write, sums):
    write("part/b.jsonl", sums(range(2)))
    pattern = str(write("part/a.jsonl", sums(range(2, 4))).replace("a.jsonl", "*.jsonl"))
    data = load(train=pattern)
    assert set(ids(data, 4)) == {"part/1/1", "part/1/2", "part/2/1", "part/2/2"}


def test_lengths_are_those_of_the_encoded_prompt(load, write, tokenizer):
    rows = [{"prompt": " ".join(["1 +"] * k) + " 1", "answer": 1} for k in range(1, 30)]
    train = write("x.jsonl", rows)
    prompts = list(map(load(train=train).train_prompt, range(29)))
    lengths = {prompt.id: len(encode_prompt(tokenizer, prompt)) for prompt in prompts}
    limit = sorted(lengths.values())[11]
    data = load(train=train, max_prompt_tokens=limit)
    assert set(ids(data, 12)) == {name for name, length in lengths.items() if length <= limit}
    assert left_out(data) == {"train": {"too long": 17}}
    assert data.report.sources[0].longest == limit
    (longest,) = data.longest_prompts()
    assert lengths[longest.id] == limit
    with pytest.raises(ValueError, match=r"no row of data\.train is left; .*left out 29: too long"):
        load(train=train, max_prompt_tokens=1)


def test_each_prompt_comes_once_an_epoch_in_a_new_order(load, write, sums):
    data = load(train=write("x.jsonl", sums(range(50))))
    first, second = ids(data, 50), ids(data, 50, start=50)
    assert sorted(first) == sorted(second) == sorted(f"x/{k}" for k in range(1, 51))
    assert first != second
    assert first != sorted(first)
    assert ids(load(train=write("x.jsonl", sums(range(50))), seed=2), 50) != first


def test_a_fresh_load_goes_on_where_another_stopped(load, write, sums):
    sources = [
        {"path": write("x.jsonl", sums(range(30))), "weight": 2},
        write("y.jsonl", sums(range(100, 140))),
    ]
    data, again = load(train=sources), load(train=sources)
    whole = [data.train_prompt(index) for index in range(400)]
    assert [again.train_prompt(index) for index in reversed(range(200, 400))] == whole[:199:-1]
    with pytest.raises(ValueError, match="got index -1"):
        again.train_prompt(-1)


def test_sources_are_mixed_by_weight_and_named(load, write, sums):
    train = [
        {"path": write("x.jsonl", sums(range(5))), "weight": 0.75},
        {"path": write("y.jsonl", sums(range(50, 90))), "weight": 0.25},
    ]
    data = load(train=train)
    drawn = [data.train_prompt(index) for index in range(100)]
    assert Counter(prompt.source for prompt in drawn) == {"x": 75, "y": 25}
    assert set(Counter(p.id for p in drawn if p.source == "x").values()) == {15}
    assert set(Counter(p.id for p in drawn if p.source == "y").values()) == {1}


def test_held_out_questions_leave_training(load, write, sums):
    train = write("t.jsonl", [*sums(range(6)), {"prompt": " 1  +\n3", "answer": 4}])
    chat = [{"role": "system", "content": "Hi."}, {"role": "user", "content": "1 + 5 "}]
    rows = [{"prompt": "1 + 3", "answer": 4}, {"prompt": chat, "answer": 6}]
    data = load(train=train, eval=write("e.jsonl", [*rows, rows[0], *sums([77])]))
    assert set(ids(data, 4)) == {"t/1", "t/2", "t/3", "t/5"}
    assert [prompt.id for prompt in data.eval_prompts()] == ["e/1", "e/2", "e/4"]
    assert left_out(data) == {"train": {"also held out": 3}, "eval": {"repeated": 1}}
    with pytest.raises(ValueError, match=r"no row of data\.train is left; .* 6: also held out"):
        load(train=write("u.jsonl", sums(range(6))), eval=write("f.jsonl", sums(range(9))))


def test_what_counts_as_the_same_question():
    def asked(*contents, role="user"):
        return question_hash([{"role": role, "content": content} for content in contents])

    assert asked("Is  A\n>\tb?") == asked(" is a > B? ")
    assert asked("STRASSE") == asked("stra\u00dfe")
    assert len({asked("a b"), asked("ab"), asked("a", "b"), asked("a b", role="assistant")}) == 4


def test_training_prompts_are_held_out_by_number(load, write, sums):
    train = [write("x.jsonl", [*sums(range(40)), *sums(range(3))]), write("y.jsonl", sums([99]))]
    data = load(train=train, eval_size=10)
    held_out = [prompt.messages[0]["content"] for prompt in data.eval_prompts()]
    assert len(set(held_out)) == len(held_out) == 10
    trained = {data.train_prompt(index).messages[0]["content"] for index in range(200)}
    assert len(trained) == 31
    assert not trained & set(held_out)
    for source in data.report.sources:
        assert source.read == source.kept + sum(source.left_out.values())
    assert load(train=train, eval_size=10, seed=7).eval_prompts() == data.eval_prompts()
    assert load(train=train, eval_size=10, eval_seed=7).eval_prompts() != data.eval_prompts()
    with pytest.raises(ValueError, match=r"of the 41 different questions .* use at most 20"):
        load(train=train, eval_size=21)


def test_repeated_training_questions_stay_and_are_counted(load, write, sums):
    data = load(train=write("x.jsonl", sums([1, 2, 1, 1])))
    assert len(set(ids(data, 4))) == 4
    assert str(data.report) == "train x: 4 of 4 rows; 2 of them repeat a question"


def test_references_are_checked_in_order_and_by_source(load, write, sums):
    def check(source, answers):
        return [f"{source.name} dislikes it" if answer == "3" else None for answer, _ in answers]

    train = [write("x.jsonl", sums(range(600))), write("y.jsonl", sums(range(3)))]
    with pytest.raises(ValueError, match=r"x\.jsonl, row 3: .*: x dislikes it") as caught:
        load(train=train, check=check)
    assert "y.jsonl, row 3: answer the verifier cannot read: y dislikes it" in str(caught.value)
    data = load(train=train, check=check, on_bad_row="skip")
    assert [source.kept for source in data.report.sources] == [599, 2]


def test_the_fingerprint_follows_content_and_choices(load, write, sums, tmp_path):
    path = write("x.jsonl", sums(range(9)))
    base = load(train=path).fingerprint
    (tmp_path / "elsewhere").mkdir()
    moved = shutil.copy(path, tmp_path / "elsewhere" / "x.jsonl")
    assert load(train=str(moved)).fingerprint == base
    assert load(train=path, max_prompt_tokens=500).fingerprint == base
    others = [
        load(train=path, seed=2),
        load(train={"path": path, "name": "z"}),
        load(train={"path": path, "columns": {"metadata": ""}}),
        load(train=path, system_prompt="Think."),
        load(train=path, eval_size=2),
        load(train=path, eval_size=2, eval_seed=1),
        load(train=path, eval=write("e.jsonl", sums([50]))),
        load(train=path, eval=write("e.jsonl", sums([51]))),
        load(train=write("y/x.jsonl", sums(range(10)))),
        load(train=write("z/x.jsonl", b"\n".join(json.dumps(r).encode() for r in sums(range(9))))),
    ]
    assert len({base, *(data.fingerprint for data in others)}) == 1 + len(others)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b"", r"x\.jsonl has no rows; remove it from data\.train"),
        ("x.jsonl", b"\n\r\n", "has no rows"),
        ("x.json", b"[]", "has no rows"),
        ("x.json", b'[{"prompt": "a"},', "is not valid JSON: Expecting value"),
        ("x.json", b'["\xff"]', "is not UTF-8 at byte 3"),
        ("x.parquet", b"PAR1 and no more", "cannot be read as Parquet"),
        ("x.parquet", b"", "cannot be read as Parquet"),
        ("x.arrow", b"", "is cut short"),
        ("x.arrow", b"no table at all", "is cut short"),
        ("x.arrow", b"ARROW1 and no more", "cannot be read as Arrow"),
        ("x.csv", b"prompt,answer", "ends in none of .jsonl, .json, .parquet, .arrow"),
    ],
)
def test_unreadable_files_are_refused(load, write, name, content, message):
    with pytest.raises(ValueError, match=message):
        load(train=write(name, content), on_bad_row="skip")


def test_files_that_are_not_there_are_refused(load, tmp_path):
    with pytest.raises(ValueError, match="no file is called or matches"):
        load(train=str(tmp_path / "absent.jsonl"))
    with pytest.raises(ValueError, match=r"is a directory; name its files"):
        load(train=str(tmp_path))


def test_columns_that_no_row_can_have(load, tmp_path):
    path = save(pa.table({"question": ["a"], "solution": ["b"]}), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=r"has the columns \['question', 'solution'\], and none"):
        load(train=path)
    twice = pa.Table.from_arrays([pa.array(["a"])] * 3, ["prompt", "prompt", "answer"])
    with pytest.raises(ValueError, match="has two columns of one name"):
        load(train=save(twice, tmp_path / "y.arrow"))


def test_thinking_needs_a_template_that_knows_it(load, write, sums, tokenizer):
    train = write("x.jsonl", sums(range(3)))
    with pytest.raises(ValueError, match=r"data\.thinking = false, but .* has no enable_thinking"):
        load(train=train, thinking=False)
    assert load(train=train).train_prompt(0).template_options == {}
    with pytest.raises(ValueError, match="has no chat template"):
        template_options(Without(), None)


class Without:
    """A tokenizer without a chat template."""

    def get_chat_template(self):
        raise ValueError("Cannot use chat template functions")


class Thinker:
    """The shipped tokenizer with another chat template."""

    def __init__(self, tokenizer, template):
        self._tokenizer, self._template = tokenizer, template

    def get_chat_template(self):
        return self._template

    def apply_chat_template(self, messages, **options):
        return self._tokenizer.apply_chat_template(
            messages, chat_template=self._template, **options
        )

    def __call__(self, texts, **options):
        return self._tokenizer(texts, **options)


def load_with(template, tokenizer, section):
    return load_data(
        DataConfig.model_validate({"verifier": "exact"} | section),
        tokenizer=Thinker(tokenizer, template),
        check_references=lambda source, answers: [None] * len(answers),
        seed=1,
    )


def test_thinking_reaches_the_template(write, sums, tokenizer):
    template = "{{ messages[0]['content'] }}{% if not enable_thinking %} + 1 + 1 + 1{% endif %}"
    section = {"train": write("x.jsonl", sums(range(3)))}
    on = load_with(template, tokenizer, section | {"thinking": True})
    off = load_with(template, tokenizer, section | {"thinking": False})
    assert off.train_prompt(0).template_options == {"enable_thinking": False}
    lengths = [data.report.sources[0].longest for data in (on, off)]
    assert lengths == [3, 9]
    assert encode_prompt(Thinker(tokenizer, template), off.train_prompt(0)) != encode_prompt(
        Thinker(tokenizer, template), on.train_prompt(0)
    )
    assert on.fingerprint != off.fingerprint


def test_a_row_that_the_template_refuses_is_named(write, sums, tokenizer):
    template = (
        "{% if '2' in messages[0]['content'] %}{{ raise_exception('no twos') }}{% endif %}"
        "{{ messages[0]['content'] }}"
    )
    section = {"train": write("x.jsonl", sums(range(4)))}
    with pytest.raises(ValueError, match="row 3: refused by the chat template: no twos"):
        load_with(template, tokenizer, section)
    data = load_with(template, tokenizer, section | {"on_bad_row": "skip"})
    assert data.report.sources[0].kept == 3
