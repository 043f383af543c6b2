"""The rollout record: what is written is what is read, and what is none is refused by its line."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_credit.batch.rollout import Rollout, Span, VersionSpan
from megatron_credit.batch.rollout_files import read_rollouts, write_rollouts

PLAIN = Rollout(
    prompt_id="p",
    sample=0,
    prompt_ids=[5, 6],
    response_ids=[7, 8, 9],
    logprobs=[-0.1, -1e-17, -3.5],
    mask=[True, False, True],
    versions=[VersionSpan(3, 0, 2), VersionSpan(4, 2, 3)],
    finish_reason="stop",
    text="1 \u2028 \u00e9 \U0001f600\n",
    answer="1",
    reward=1.0,
)
FULL = replace(
    PLAIN,
    outcome="right",
    parsed="1",
    source="sums",
    messages=[{"role": "system", "content": ""}, {"role": "user", "content": "2 - 1 = \u00e9?"}],
    template_options={"enable_thinking": False},
    metadata={"terms": [2, -1.5, None], "entry": {"\u00e9": {}, "deep": [[True]]}},
    advantages=[0.5, 0.0, 1 / 3],
    token_values={"entropy": [0.25, 0.0, 2.0], "policy_logprob": [-0.1, -0.2, -0.3]},
    spans={"step": [Span(0, 2, 0.1), Span(2, 3, -1.0)], "attempt": []},
    evidence={"sibling": "2"},
)
NOTHING_KNOWN = replace(
    PLAIN,
    reward=math.nan,
    logprobs=[-0.5, math.nan, -0.5],
    token_values={"entropy": [math.nan] * 3},
    spans={"segment": [Span(0, 3)]},
)
OPTIONAL = (
    *("advantages", "token_values", "spans", "evidence", "source", "parsed", "outcome"),
    *("messages", "template_options", "metadata", "routed_experts"),
)
formats = pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])


def there_and_back(path, rollouts):
    write_rollouts(path, rollouts)
    return list(read_rollouts(path))


@formats
def test_everything_comes_back(tmp_path, suffix):
    rollouts = [PLAIN, FULL] * 300  # more than one row group
    assert there_and_back(tmp_path / f"r{suffix}", rollouts) == rollouts
    assert [path.name for path in tmp_path.iterdir()] == [f"r{suffix}"]


@formats
def test_nan_comes_back_as_nan(tmp_path, suffix):
    (found,) = there_and_back(tmp_path / f"r{suffix}", [NOTHING_KNOWN])
    assert repr(found) == repr(NOTHING_KNOWN)  # NaN is not equal to itself


@formats
def test_an_empty_record(tmp_path, suffix):
    assert there_and_back(tmp_path / f"r{suffix}", []) == []


@given(
    st.lists(st.floats(allow_infinity=False, width=64), max_size=4),
    st.text(st.characters(codec="utf-8"), max_size=8),
    st.none() | st.text(st.characters(codec="utf-8"), max_size=3),
)
def test_both_formats_hold_the_same(tmp_path_factory, values, text, parsed):
    rollout = replace(
        PLAIN,
        response_ids=list(range(len(values))),
        logprobs=values,
        mask=[True] * len(values),
        text=text,
        parsed=parsed,
    )
    directory = tmp_path_factory.mktemp("formats")
    found = [there_and_back(directory / f"r{s}", [rollout]) for s in (".jsonl", ".parquet")]
    assert repr(found[0]) == repr(found[1]) == repr([rollout])


def test_parquet_has_one_column_a_field_and_null_for_nan(tmp_path):
    from pyarrow.parquet import read_table

    write_rollouts(tmp_path / "r.parquet", [NOTHING_KNOWN])
    table = read_table(tmp_path / "r.parquet")
    assert table.column_names == list(vars(PLAIN))
    assert table["reward"].null_count == 1
    assert table["versions"].to_pylist()[0][0] == {"version": 3, "start": 0, "end": 2}


def test_the_documentation_has_every_field():
    text = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()
    assert [name for name in vars(PLAIN) if f"\n| `{name}` " not in text] == []


def line_of(rollout, tmp_path):
    write_rollouts(tmp_path / "one.jsonl", [rollout])
    return json.loads((tmp_path / "one.jsonl").read_text())


def error_of_second_line(tmp_path, text):
    path = tmp_path / "r.jsonl"
    path.write_bytes(json.dumps(line_of(PLAIN, tmp_path)).encode() + b"\n" + text + b"\n")
    with pytest.raises(ValueError) as caught:
        list(read_rollouts(path))
    assert str(caught.value).startswith(f"{path}, line 2: not a rollout record: ")
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"score": 1}, "unknown field score; known are prompt_id, "),
        ({"sample": True}, "field sample holds True; expected an integer"),
        ({"sample": 1.0}, "field sample holds 1.0; expected an integer"),
        ({"text": None}, "field text holds None; expected a text"),
        ({"reward": "1"}, "field reward holds '1'; expected a number or null"),
        ({"prompt_ids": [5, "6"]}, "field prompt_ids holds [5, '6']; expected a list of integers"),
        ({"mask": [1, 1, 1]}, "field mask holds [1, 1, 1]; expected a list of true and false"),
        ({"versions": [[1, 2]]}, "expected a list of [version, start, end]"),
        ({"versions": 3}, "expected a list of [version, start, end]"),
        ({"spans": {"step": [[0, 1, "x"]]}}, "expected lists of [start, end, score] by name"),
        ({"evidence": []}, "field evidence holds []; expected texts by name"),
        ({"messages": [{"role": 1}]}, "expected a list of texts by name"),
        ({"messages": ["hello"]}, "field messages holds ['hello']; expected a list of texts"),
        ({"metadata": [1]}, "field metadata holds [1]; expected values by name"),
        ({"template_options": "{"}, "field template_options holds '{'; expected values by name"),
        ({"logprobs": [-1.0]}, "logprobs has 1 entries for 3 response tokens"),
        ({"mask": []}, "mask has 0 entries for 3 response tokens"),
        ({"advantages": [1.0]}, "advantages has 1 entries for 3 response tokens"),
        ({"token_values": {"kl": []}}, "token_values.kl has 0 entries for 3 response tokens"),
    ],
)
def test_a_wrong_field_is_named(tmp_path, change, message):
    record = line_of(PLAIN, tmp_path) | change
    assert message in error_of_second_line(tmp_path, json.dumps(record).encode())


@pytest.mark.parametrize("name", ["prompt_id", "response_ids", "reward", "mask"])
def test_a_missing_field_is_named(tmp_path, name):
    record = line_of(PLAIN, tmp_path)
    del record[name]
    error = error_of_second_line(tmp_path, json.dumps(record).encode())
    assert error.endswith(f"missing field {name}")


def test_fields_that_a_step_adds_later_may_be_missing(tmp_path):
    record = line_of(PLAIN, tmp_path)
    for name in OPTIONAL:
        del record[name]
    (tmp_path / "r.jsonl").write_text(json.dumps(record))
    assert list(read_rollouts(tmp_path / "r.jsonl")) == [PLAIN]


def test_parquet_columns_that_were_added_later_may_be_missing(tmp_path):
    from pyarrow.parquet import read_table, write_table

    write_rollouts(tmp_path / "r.parquet", [PLAIN])
    old = read_table(tmp_path / "r.parquet").drop_columns(list(OPTIONAL))
    write_table(old, tmp_path / "old.parquet")
    assert list(read_rollouts(tmp_path / "old.parquet")) == [PLAIN]


@pytest.mark.parametrize("text", [b"[1]", b"7", b"null"])
def test_a_line_that_is_no_object_is_refused(tmp_path, text):
    assert "expected an object with named fields, got " in error_of_second_line(tmp_path, text)


@pytest.mark.parametrize("text", [b'{"prompt_id": "p", "sam', b"\xff\xfe", b"{'a': 1}"])
def test_a_line_that_is_not_json_is_named(tmp_path, text):
    path = tmp_path / "r.jsonl"
    path.write_bytes(b"\n" + text)
    with pytest.raises(ValueError, match=r"r\.jsonl, line 2 is not JSON: "):
        list(read_rollouts(path))


def test_a_file_that_is_no_parquet_is_refused(tmp_path):
    (tmp_path / "r.parquet").write_text("{}")
    with pytest.raises(ValueError, match=r"r\.parquet cannot be read as Parquet: "):
        list(read_rollouts(tmp_path / "r.parquet"))


def test_foreign_parquet_columns_are_named(tmp_path):
    from pyarrow import table
    from pyarrow.parquet import write_table

    write_table(table({"question": ["1+1"]}), tmp_path / "r.parquet")
    with pytest.raises(ValueError, match="missing field answer, finish_reason, logprobs"):
        list(read_rollouts(tmp_path / "r.parquet"))


def test_a_wrong_parquet_row_is_named(tmp_path):
    path = tmp_path / "r.parquet"
    write_rollouts(path, [PLAIN, replace(PLAIN, logprobs=[-1.0])])
    with pytest.raises(ValueError, match="row 2: not a rollout record: logprobs has 1 entries"):
        list(read_rollouts(path))


def test_other_names_and_no_file(tmp_path):
    (tmp_path / "r.csv").write_text("a,b")
    with pytest.raises(ValueError, match=r"is named \*\.jsonl or \*\.parquet"):
        list(read_rollouts(tmp_path / "r.csv"))
    with pytest.raises(ValueError, match="there is no rollout record at"):
        list(read_rollouts(tmp_path / "absent.jsonl"))


def test_a_broken_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "r.jsonl"
    write_rollouts(path, [PLAIN])

    def fails():
        yield FULL
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        write_rollouts(path, fails())
    assert list(read_rollouts(path)) == [PLAIN]
