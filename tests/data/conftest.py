import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megatron_credit.data.config import DataConfig
from megatron_credit.data.load import load_data

MODEL = Path(__file__).parents[2] / "models" / "chain-sum-0.6m"


@pytest.fixture(scope="session")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="session")
def load(tokenizer):
    """Loads a `[data]` section with the shipped model's tokenizer and references that all pass."""

    def loaded(*, seed=1, check=lambda source, answers: [None] * len(answers), **section):
        config = DataConfig.model_validate({"verifier": "exact"} | section)
        return load_data(config, tokenizer=tokenizer, check_references=check, seed=seed)

    return loaded


@pytest.fixture
def write(tmp_path):
    """Writes rows, or bytes as they are, as lines of JSON under a name and returns the path."""

    def written(name, rows):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not isinstance(rows, bytes):
            rows = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        path.write_bytes(rows)
        return str(path)

    return written


@pytest.fixture
def sums():
    """Rows `1 + k` with their answers."""

    def made(numbers):
        return [{"prompt": f"1 + {k}", "answer": 1 + k} for k in numbers]

    return made
