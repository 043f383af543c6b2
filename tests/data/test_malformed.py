"""Malformed rows by the hundred: a clear ValueError or right counts, never anything else."""

import json

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

FEW = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=[]), max_size=8)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {}, optional={"role": st.sampled_from(["user", "assistant", "system", "tool", 3, None])}
        | {"content": st.sampled_from(["1 + 1", "", " ", None, 3, [{"type": "text"}], "\ud800"])}
    ),
    max_size=3,
)
ROWS = st.fixed_dictionaries(
    {},
    optional={
        "prompt": st.sampled_from(["1 + 1", "1 + 2", "a" * 50]) | VALUES | MESSAGES,
        "messages": st.none() | MESSAGES | VALUES,
        "answer": st.sampled_from(["2", 2, 2.5]) | VALUES,
        "id": st.none() | st.sampled_from(["a", 1]) | VALUES,
        "metadata": st.none() | st.just({"k": 1}) | st.just('{"k": 1}') | VALUES,
    },
)
GOOD = {"prompt": "1 + 1", "answer": 2, "id": "good"}
LINES = st.lists(
    st.one_of(
        st.just(json.dumps(GOOD).encode()),
        ROWS.map(lambda row: json.dumps(row).encode()),
        st.binary(max_size=40),
        VALUES.map(lambda value: json.dumps(value).encode()),
        st.sampled_from([b"", b"\r", b"{", b"\xff\xfe", b"[" * 5000, b'{"a": 1' + b"0" * 5000]),
        st.just(b'{"prompt": "' + b"x" * 1000 + b'", "answer": 1}'),
    ),
    max_size=6,
)


def check(load, path, num_rows):
    """Loads with skip and with stop; both must agree on what is malformed."""
    section = {"train": path, "max_row_bytes": 900, "max_prompt_tokens": 40}
    try:
        data = load(on_bad_row="skip", **section)
    except ValueError as error:
        message = str(error)
        assert "no row of data.train is left" in message or "has no rows" in message, message
        with pytest.raises(ValueError, match=r"malformed rows|too long|has no rows"):
            load(**section)
        return
    (source,) = data.report.sources
    assert source.read == num_rows == source.kept + sum(source.left_out.values())
    drawn = [data.train_prompt(index) for index in range(source.kept)]
    assert len({prompt.id for prompt in drawn}) == source.kept
    assert all(prompt.answer.strip() and prompt.messages[-1]["content"] for prompt in drawn)
    if source.bad.counts:
        with pytest.raises(ValueError, match="the data has malformed rows") as caught:
            load(**section)
        listed = str(caught.value).splitlines()[1:-2]
        assert len(listed) == source.bad.counts.total()
        assert all(line.startswith(f"  {path}, row ") for line in listed)
    else:
        assert load(**section).fingerprint == data.fingerprint


@FEW
@given(lines=LINES)
@example(lines=[json.dumps(GOOD).encode()] * 2)
@example(lines=[b'{"prompt": "1", "answer": ' + b"9" * 4301 + b"}", json.dumps(GOOD).encode()])
def test_lines(load, write, lines):
    content = b"\n".join(lines)
    path = write("x.jsonl", content)
    rows = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    check(load, path, sum(bool(line.strip()) for line in rows))


@FEW
@given(rows=st.lists(ROWS | VALUES, max_size=5))
def test_arrays(load, write, rows):
    check(load, write("x.json", json.dumps([*rows, GOOD]).encode()), len(rows) + 1)


@FEW
@given(content=st.binary(max_size=300))
def test_noise_is_no_table(load, write, content):
    for name in ("x.parquet", "x.arrow"):
        with pytest.raises(ValueError, match=r"x\.(parquet|arrow) (cannot be read as|is cut)"):
            load(train=write(name, content), on_bad_row="skip")


@pytest.fixture(scope="module")
def table_files(tmp_path_factory):
    """A Parquet and an Arrow file with 30 good rows, as bytes."""
    path = tmp_path_factory.mktemp("tables")
    table = pa.table({"prompt": [f"1 + {k}" for k in range(30)], "answer": list(range(30))})
    parquet.write_table(table, path / "x.parquet", write_page_checksum=True)
    sink = str(path / "x.arrow")
    with pa.OSFile(sink, "wb") as opened, pa.ipc.new_stream(opened, table.schema) as writer:
        writer.write_table(table, max_chunksize=10)
    return {name: (path / name).read_bytes() for name in ("x.parquet", "x.arrow")}


@FEW
@given(name=st.sampled_from(["x.parquet", "x.arrow"]), length=st.floats(0, 1, exclude_max=True))
def test_tables_that_were_cut_short(load, write, table_files, name, length):
    content = table_files[name]
    path = write(name, content[: int(len(content) * length)])
    with pytest.raises(ValueError, match=r"cannot be read as|is cut short"):
        load(train=path, on_bad_row="skip")


def columns(size):
    """A column of any type, of `size` values some of which may be null."""
    pick = st.lists(st.integers(0, 3), min_size=size, max_size=size)
    choices = [
        (pa.string(), ["1 + 1", "1 + 2", "", None]),
        (pa.large_string(), ["a", "b", " ", None]),
        (pa.int64(), [1, 2, -3, None]),
        (pa.float32(), [1.0, 0.5, float("nan"), None]),
        (pa.bool_(), [True, False, True, None]),
        (pa.binary(), [b"a", b"\xff", b"", None]),
        (pa.decimal128(8, 2), [1, 2, None, None]),
        (pa.timestamp("ns", tz="Nowhere/Land"), [1, 2, 3, None]),
        (pa.timestamp("s"), [2**60, 1, 2, None]),
        (pa.date32(), [1, 2**30, 3, None]),
        (pa.list_(pa.string()), [["a"], [], [None], None]),
        (pa.map_(pa.string(), pa.int32()), [[("a", 1)], [], [], None]),
        (pa.struct([("k", pa.duration("s")), ("l", pa.int8())]), [{"l": 1}, {"k": 2}, {}, None]),
        (
            pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])),
            [[{"role": "user", "content": "1"}], [{"role": "user"}], [None], None],
        ),
        (pa.null(), [None] * 4),
    ]
    typed = st.sampled_from(choices)
    return st.tuples(typed, pick).map(
        lambda drawn: pa.array([drawn[0][1][k] for k in drawn[1]], type=drawn[0][0])
    )


TABLES = st.integers(1, 6).flatmap(
    lambda size: st.dictionaries(
        st.sampled_from(["prompt", "messages", "answer", "id", "metadata", "other"]),
        columns(size),
        min_size=1,
    ).map(pa.table)
)


@FEW
@given(table=TABLES)
def test_tables_of_any_types(load, tmp_path, table):
    path = tmp_path / "x.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    if set(table.column_names) == {"other"}:
        with pytest.raises(ValueError, match=r"has the columns \['other'\], and none"):
            load(train=str(path))
        return
    check(load, str(path), table.num_rows)


@FEW
@given(texts=st.lists(st.binary(max_size=6), min_size=1, max_size=8))
def test_parquet_texts_that_are_no_utf8(load, tmp_path, texts):
    prompts = pa.array([b"1 + " + text for text in texts], pa.binary())
    answers = pa.array(range(len(texts)))
    raw = pa.Array.from_buffers(pa.string(), len(texts), prompts.buffers())
    parquet.write_table(pa.table({"prompt": raw, "answer": answers}), tmp_path / "x.parquet")
    good = [number for number, text in enumerate(texts) if is_utf8(text)]
    section = {"train": str(tmp_path / "x.parquet"), "on_bad_row": "skip"}
    if not good:
        with pytest.raises(ValueError, match="row 1: bad UTF-8"):
            load(**section)
        return
    data = load(**section)
    assert sorted(data.train_prompt(k).answer for k in range(len(good))) == [str(k) for k in good]
    assert data.report.sources[0].bad.counts["bad UTF-8"] == len(texts) - len(good)


def is_utf8(text):
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
