"""Whatever stands in a configuration file: a run configuration or one readable error, never a
traceback."""

import copy
import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.load_config import ConfigError, load_config, parse_config

VALID = {
    "run": {"directory": "runs/x", "seed": 1},
    "data": {
        "train": [{"path": "a.parquet", "name": "a", "weight": 2.0, "columns": {"prompt": "q"}}],
        "eval": "b.jsonl",
        "verifier": {"kind": "math"},
    },
    "policy": {"model": "models/x"},
    "parallel": {"tensor": 2},
    "optimizer": {"lr": 1e-5, "betas": [0.9, 0.95]},
    "engine": {"max_model_len": 128},
    "sampling": {"max_new_tokens": 70, "stop_token_ids": [1]},
    "credit": {"method": "grpo", "options": {}},
    "objective": {"clip_low": 0.2},
    "trainer": {"steps": 3},
    "loggers": {"wandb": {"project": "p"}},
}
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(min_value=-(2**70), max_value=2**70),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(["inf", "math", "0", "", "\x00", "[", "a.b", "grpo", "\udcff"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)


def places(tree, prefix=()):
    """The path of every key below a tree, sections and list items included."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        yield (*prefix, key)
        if isinstance(value, dict | list):
            yield from places(value, (*prefix, key))


@st.composite
def mutated(draw):
    """The valid tree with one to three keys replaced, removed, or joined by a stranger."""
    tree = copy.deepcopy(VALID)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(places(tree))))
        owner = tree
        for key in path[:-1]:
            owner = owner[key]
        change = draw(st.sampled_from(["replace", "remove", "add"]))
        if change == "replace":
            owner[path[-1]] = draw(values)
        elif change == "remove":
            del owner[path[-1]]
        elif isinstance(owner, dict):
            owner[draw(st.text(max_size=10))] = draw(values)
        if not tree:
            break
    return tree


def only_clear_errors(attempt):
    """The configuration, or None after an error that a person can act on."""
    try:
        return attempt()
    except ConfigError as error:
        message = str(error)
        assert len(message) > 20, message
        for noise in ("pydantic", "Traceback", "input_type=", "For further information"):
            assert noise not in message, message
        return None


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tree=mutated())
def test_a_changed_tree(tree):
    config = only_clear_errors(lambda: parse_config(tree, [], source="my.toml"))
    assert config is None or RunConfig.model_validate_json(config.model_dump_json()) == config


@settings(max_examples=150, deadline=None)
@given(override=st.text(max_size=30) | st.from_regex(r"(run|data|trainer)\.[a-z]{0,6}=.{0,8}"))
def test_a_changed_override(override):
    only_clear_errors(lambda: parse_config(copy.deepcopy(VALID), [override], source="my.toml"))


@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=60))
def test_a_file_of_any_bytes(content, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(content)
    assert only_clear_errors(lambda: load_config(path, [])) is None


def test_the_valid_tree_is_valid():
    assert parse_config(copy.deepcopy(VALID), [], source="my.toml").trainer.steps == 3


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "configs").rglob("*.toml")))
def test_every_shipped_configuration_parses(path):
    assert parse_config(tomllib.loads(path.read_text()), [], source=path.name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": {"train": "a.parquet", "verifyer": "math"}}, r"did you mean 'verifier'\?"),
        ({"data": {"train": [{"path": "a.json", "wieght": 1}]}}, r"did you mean 'weight'\?"),
        ({"data": {"train": {"path": "a.json", "columns": {"anser": "a"}}}}, "mean 'answer'"),
        ({"data": {"train": [], "verifier": "math"}}, "data.train"),
        ({"data": {"train": "a.parquet"}}, "set verifier ="),
        ({"data": {"train": "a.parquet", "verifier": "maths"}}, "'math'"),
        ({"data": None}, r"either \[data\]"),
        ({"task": {"kind": "chain_sum"}}, "got both"),
        ({"loggers": {"wandb": {"projct": "p"}}}, r"did you mean 'project'\?"),
        ({"trainer": {"steps": "many"}}, "trainer.steps"),
    ],
)
def test_messages_name_the_key_and_the_remedy(change, message):
    tree = {name: value for name, value in (VALID | change).items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        parse_config(tree, [], source="my.toml")
