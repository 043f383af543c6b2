"""The reference of configuration keys is current and complete."""

from pathlib import Path

from megatron_credit.trainer import metric_names
from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.load_config import section_types
from megatron_credit.trainer.reference import reference

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_document_is_what_the_models_say():
    assert DOCUMENT.read_text() == reference()


def test_every_key_has_a_meaning():
    for name, field in RunConfig.model_fields.items():
        for model in section_types(field.annotation):
            for key, declared in model.model_fields.items():
                assert declared.description, f"{name}.{key} has no docstring"


def test_the_metrics_document_is_what_the_table_says():
    assert (DOCUMENT.parent / "metrics.md").read_text() == metric_names.reference()
