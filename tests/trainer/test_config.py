"""Configurations: what parses, what is refused and with which words."""

from pathlib import Path

import pytest

from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.load_config import ConfigError, load_config, parse_config, read_toml

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").rglob("*.toml"))
QUICKSTART = ROOT / "configs" / "quickstart.toml"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_parses_and_round_trips(path):
    config = load_config(path, [])
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.stepps=3", "trainer.stepps: unknown key; did you mean 'steps'?"),
        ("trainr.steps=3", "trainr: unknown key; did you mean 'trainer'?"),
        ("task.min_term=3", "unknown key; did you mean 'min_terms'?"),
        ("optimizer.lr=-1", "optimizer.lr: Input should be greater than 0, got -1"),
        ("trainer.steps=many", "trainer.steps: Input should be a valid integer"),
        ("policy.dtype=fp16", "policy.dtype: Input should be 'fp32' or 'bf16', got 'fp16'"),
        ("trainer.updates_per_step=5", "updates_per_step=5; use one of [1, 2, 3, 4, 6, 8, 12, 24]"),
        ("run.processes=3", "run.processes=3 is not a multiple of tensor x pipeline x context = 2"),
        ("sampling.top_p=0.9", "top_p=0.9 samples from a cut distribution"),
        ("sampling.top_k=50", "top_k=50 samples from a cut distribution"),
        ("sampling.temperature=0", "sampling.temperature: Input should be greater than 0"),
        ("parallel.virtual_pipeline=2", "needs pipeline > 1"),
        ("objective.normalisation=constant", "set constant_length"),
        ("objective.kl_coef=0.1", "needs log-probs of a reference policy"),
        ("engine.address=localhost:8000", "engine.address"),
        ("run.seed=-1", "run.seed"),
        ("steps", "is not of the form section.key=value"),
        ("=3", "is not of the form section.key=value"),
        ("trainer.steps.x=3", "'steps' is a value, not a section"),
    ],
)
def test_bad_values_are_named(override, message):
    with pytest.raises(ConfigError) as error:
        load_config(QUICKSTART, [override])
    assert message in str(error.value)


def test_all_problems_are_reported_at_once():
    with pytest.raises(ConfigError) as error:
        load_config(QUICKSTART, ["trainer.stepps=3", "optimizer.lr=0"])
    assert "stepps" in str(error.value) and "optimizer.lr" in str(error.value)


def test_missing_section():
    tree = read_toml(QUICKSTART)
    del tree["sampling"]
    with pytest.raises(ConfigError, match="sampling: missing"):
        parse_config(tree, [], source="here")


def test_overrides_are_toml_or_bare_strings():
    config = load_config(
        QUICKSTART,
        [
            "trainer.steps=7",
            "optimizer.betas=[0.8, 0.9]",
            "run.directory=some/where",
            "run.resume=never",
        ],
    )
    assert config.trainer.steps == 7
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.run.directory == Path("some/where")
    assert config.run.resume == "never"


def test_missing_file_names_the_nearest():
    with pytest.raises(ConfigError, match=r"did you mean quickstart\.toml"):
        load_config(QUICKSTART.with_name("quikstart.toml"), [])


def test_malformed_toml_names_the_line(tmp_path):
    path = tmp_path / "broken.toml"
    path.write_text("[run]\ndirectory = \n")
    with pytest.raises(ConfigError, match=r"is not valid TOML: .*line 2"):
        load_config(path, [])
