import subprocess
import sys

import pytest
from pydantic import ValidationError

from megatron_credit.data.config import ColumnsConfig, DataConfig
from megatron_credit.rewards.config import ExactConfig, MathConfig


def config(**section):
    return DataConfig.model_validate({"verifier": "math"} | section)


def test_a_path_alone_is_a_source_named_after_the_file():
    (source,) = config(train="data/gsm8k.train.parquet").train
    assert (source.name, source.weight, str(source.path)) == (
        "gsm8k.train",
        1.0,
        "data/gsm8k.train.parquet",
    )


def test_a_pattern_is_named_after_its_directory():
    names = [source.name for source in config(train=["math/*.parquet", "*.jsonl"]).train]
    assert names == ["math", "data"]


def test_paths_and_tables_may_be_mixed():
    tables = [{"path": "a.jsonl", "weight": 3, "name": "x", "verifier": "exact"}, "b.jsonl"]
    parsed = config(train=tables, eval="c.jsonl")
    assert [source.name for source in (*parsed.train, *parsed.eval)] == ["x", "b", "c"]
    assert parsed.verifier_of(parsed.train[0]) == ExactConfig()
    assert parsed.verifier_of(parsed.train[1]) == MathConfig()


def test_it_survives_the_way_to_json_and_back():
    parsed = config(train=["a.jsonl", {"path": "b/*.arrow", "columns": {"metadata": ["x", "y"]}}])
    assert DataConfig.model_validate_json(parsed.model_dump_json()) == parsed


def test_top_level_columns_hold_the_nested_ones():
    columns = ColumnsConfig(answer="reward.truth", id="", metadata=("level",))
    assert columns.top_level == {"prompt", "messages", "reward.truth", "reward", "level"}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"train": []}, "at least 1"),
        ({"train": 3}, "valid tuple"),
        ({"train": [3]}, "SourceConfig"),
        ({"train": {"pat": "a.jsonl"}}, "Extra inputs"),
        ({"train": {"path": "a.jsonl", "weight": 0}}, "greater than 0"),
        ({"train": {"path": "a.jsonl", "verifier": "maths"}}, "did you mean 'math'"),
        ({"train": ["a/x.jsonl", "b/x.jsonl"]}, "2 sources are called 'x'"),
        ({"train": "train/x.jsonl", "eval": "test/x.jsonl"}, "2 sources are called 'x'"),
        ({"train": "a.jsonl", "eval": "b.jsonl", "eval_size": 4}, "keep one of the two"),
        ({"train": "a.jsonl", "verifier": None}, "nothing checks the answers of a; set verifier"),
        ({"train": "a.jsonl", "on_bad_row": "ignore"}, "'stop' or 'skip'"),
        ({"train": "a.jsonl", "system_prompt": ""}, "at least 1 character"),
        (
            {"train": {"path": "a", "columns": {"prompt": "", "messages": ""}}},
            "both empty",
        ),
        (
            {"train": {"path": "a", "columns": {"prompt": "messages"}}},
            'set columns.messages = ""',
        ),
    ],
)
def test_bad_sections_are_refused(section, message):
    with pytest.raises(ValidationError, match=message):
        config(**section)


def test_the_configuration_imports_light():
    heavy = "{'datasets', 'pyarrow', 'pandas', 'torch', 'transformers', 'numpy'}"
    code = f"import sys, megatron_credit.data.config; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
