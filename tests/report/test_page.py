"""What goes into the page of a run: the files that it is made of, their packing, the notices."""

import base64
import json
import math
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report.example_runs import METRICS, MODEL, rollout, write_example, write_large_run
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from megatron_credit.batch.rollout_files import read_rollouts, write_rollouts
from megatron_credit.report.page.encode import byte_planes, rounded, token_series
from megatron_credit.report.page.headline import step_ranges
from megatron_credit.report.page.vocabulary import Vocabulary
from megatron_credit.report.page.write import mantissa_that_fits, read_run, write_page


def index_of(page: Path) -> dict[str, Any]:
    """The index that a page carries."""
    match = re.search(r'id="index">([^<]*)<', page.read_text())
    assert match
    return json.loads(zlib.decompress(base64.b64decode(match[1])))


def notices_of(run: Path, **options: int) -> str:
    """All notices of a run's page."""
    return "\n".join(index_of(write_page(run, **options))["notices"])


@pytest.fixture
def run(tmp_path):
    write_example(tmp_path / "mine")
    return tmp_path / "mine"


def test_metrics_are_the_numbers_of_the_file(run):
    index = index_of(write_page(run))
    assert index["metrics"][1]["reward/mean"] == 0.30000000000000004
    assert index["metrics"][1]["grad_norm"] == "NaN"
    assert index["metrics"][2] == METRICS[2]
    assert index["results"] == [["eval/accuracy", 2, 0.75], ["reward/mean", 2, 0.5]]
    assert index["notices"] == []


def test_rows_of_the_table(run):
    mixed, hostile = index_of(write_page(run))["groups"]
    assert mixed["reward"] == [1.0, 0.0]
    assert mixed["parsed"] == ["3", "4"]
    assert mixed["credit"][1] == 0.75
    assert hostile["credit"] == [None, None]
    assert hostile["finish"] == ["length", "length"]
    assert mixed["spelled"] and hostile["spelled"]


def test_the_page_goes_where_it_is_told(run, tmp_path):
    assert write_page(run) == run / "inspect.html"
    assert write_page(run, tmp_path / "other.html") == tmp_path / "other.html"
    with pytest.raises(ValueError, match=r"absent/page\.html cannot be written"):
        write_page(run, tmp_path / "absent/page.html")


def test_nothing_of_a_run_stands_in_the_page_as_markup(run):
    page = write_page(run.rename(run.parent / "<b>&amp;")).read_text()
    assert "attacked" not in page
    assert "<title>&lt;b&gt;&amp;amp; - megatron-credit</title>" in page


def test_a_cut_off_line_is_left_out_and_told(run):
    with (run / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 3, "reward/me')
    index = index_of(write_page(run))
    assert len(index["metrics"]) == 3
    assert index["notices"] == ["The last line of metrics.jsonl was cut off and is left out."]


def test_steps_without_rollouts_are_told(run):
    with (run / "metrics.jsonl").open("a") as lines:
        lines.writelines(f'{{"step": {step}}}\n' for step in (3, 4, 5, 7))
    assert "No rollouts were found of these steps: 3-5, 7." in notices_of(run)


def test_step_ranges():
    assert step_ranges([1, 2, 3, 7, 9, 10]) == "1-3, 7, 9-10"


def test_without_a_tokenizer_the_page_says_so_and_keeps_the_texts(run):
    (run / "config.json").write_text('{"policy": {"model": "nowhere/at-all"}}')
    index = index_of(write_page(run))
    assert "No tokenizer could be loaded, so tokens are shown by their ids (nowhere/at-all: " in (
        index["notices"][0]
    )
    assert set(index["vocabulary"]["texts"]) == {None}
    assert not index["groups"][0]["spelled"]


def test_a_sample_is_whole_groups_of_all_steps_and_told(tmp_path):
    run = tmp_path / "large"
    write_large_run(run, num_rollouts=320, num_tokens=4, num_steps=10)
    index = index_of(write_page(run, max_rollouts=100))
    assert [len(group["sample"]) for group in index["groups"]] == [8] * len(index["groups"])
    assert 80 <= 8 * len(index["groups"]) <= 104
    assert {group["step"] for group in index["groups"]} == set(range(1, 11))
    assert f"holds {8 * len(index['groups'])} of the run's 320 rollouts" in index["notices"][0]
    assert index_of(write_page(run))["notices"] == []


def test_fewer_groups_than_steps_are_spread_over_the_steps(tmp_path):
    run = tmp_path / "large"
    write_large_run(run, num_rollouts=160, num_tokens=4, num_steps=20)
    steps = [group["step"] for group in index_of(write_page(run, max_rollouts=40))["groups"]]
    assert len(steps) in (5, 6)
    assert max(np.diff(steps)) <= 5


def test_a_directory_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds no run: no config\.json"):
        write_page(tmp_path)
    with pytest.raises(ValueError, match="absent is not a directory"):
        write_page(tmp_path / "absent")


def test_a_run_without_anything_but_a_config_has_a_page(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    index = index_of(write_page(tmp_path))
    assert (index["groups"], index["metrics"]) == ([], [])
    assert index["notices"] == ["The run directory has no rollouts (rollouts/step-*.jsonl)."]


@pytest.mark.parametrize("line", ["{", "null"])
def test_a_line_that_is_no_rollout_is_named(run, line):
    with (run / "rollouts/step-000002.jsonl").open("a") as lines:
        lines.write(line + "\n")
    with pytest.raises(ValueError, match=r"step-000002\.jsonl, line 3"):
        write_page(run)


@pytest.mark.parametrize("line", ["{", "[]", "{}"])
def test_a_line_that_is_no_metric_is_named(run, line):
    with (run / "metrics.jsonl").open("a") as lines:
        lines.write(line + "\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl line 4 "):
        write_page(run)


def test_the_gap_is_taken_before_rounding():
    series = token_series(rollout("1+2"))
    assert series["gap"] == pytest.approx([1e-7] * 3, rel=1e-6)
    assert "policy_logprob" not in series


def test_planes_hold_the_rounded_numbers():
    numbers = np.array([1.015, -2.5, 0.0, math.nan, 1e-7], dtype=np.float32)
    exact = np.frombuffer(byte_planes(rounded(numbers, 23), 4), np.uint8).reshape(4, 5)
    words = (exact.astype(np.uint32) << np.array([[24], [16], [8], [0]], dtype=np.uint32)).sum(0)
    np.testing.assert_array_equal(words.astype(np.uint32).view(np.float32), numbers)
    coarse = (rounded(numbers, 6) << np.uint32(16)).view(np.float32)
    np.testing.assert_allclose(coarse, numbers, rtol=2**-7)


def test_numbers_keep_as_many_bits_as_fit(run, monkeypatch):
    groups = read_run(run, max_rollouts=100).groups
    from megatron_credit.report.page import write

    names = ["advantage", "logprob"]
    ids = write.IdTable(groups)
    assert mantissa_that_fits(groups, names, ids) == 23
    monkeypatch.setattr(write, "BLOB_BUDGET", 0)
    assert mantissa_that_fits(groups, names, ids) == 6


def test_parts_of_characters_are_bytes():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids = tokenizer("6 \u2713")["input_ids"]
    pieces = Vocabulary(tokenizer).pieces(ids)
    assert b"".join(piece or b"" for piece in pieces) == "6 \u2713".encode()
    assert b"\xe2" in pieces
    assert Vocabulary(tokenizer).spell(ids) == "6 \u2713"


def test_parquet_has_the_same_page(run):
    before = index_of(write_page(run))["groups"]
    for path in run.glob("rollouts/*.jsonl"):
        write_rollouts(path.with_suffix(".parquet"), read_rollouts(path))
        path.unlink()
    assert index_of(write_page(run))["groups"] == before


def test_ids_outside_the_vocabulary_have_no_piece():
    vocabulary = Vocabulary(AutoTokenizer.from_pretrained(MODEL))
    assert vocabulary.pieces([21, 99_999])[1] is None
    assert vocabulary.spell([21, 99_999]) is None


def test_pieces_of_a_sentencepiece_vocabulary():
    names = {"\u2581hi": 0, "<0xE2>": 1, "x": 2}
    words = Tokenizer(models.BPE(vocab=names, merges=[], byte_fallback=True))
    words.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    assert Vocabulary(tokenizer).pieces([0, 1, 2]) == [b" hi", b"\xe2", b"x"]
