"""Writes the page of a run."""

import base64
import hashlib
import html
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_credit.batch.rollout import Rollout
from megatron_credit.report.page.encode import (
    MANTISSAS,
    IdTable,
    PackedGroup,
    deflated_json,
    encode_group,
    pack_group,
)
from megatron_credit.report.page.headline import config_facts, last_values, step_ranges
from megatron_credit.report.page.run_files import (
    RolloutGroup,
    read_config,
    read_groups,
    read_metrics,
    rollout_files,
    share_to_show,
)
from megatron_credit.report.page.vocabulary import Vocabulary, load_tokenizer

ASSETS = Path(__file__).parent / "assets"
STYLES = ("base", "workbench", "viewer")
SCRIPTS = (
    "data", "format", "text", "colour", "chart", "curves", "rows", "filters", "table",
    "tokens", "card", "viewer", "pane", "link", "keys", "main",
)  # fmt: skip
SLOT = re.compile(r"\{\{(\w+)\}\}")
BLOB_BUDGET = 27 * 2**20
"""Bytes of base64 that the rollouts may take in the page."""
PROBED_GROUPS = 64
"""How many groups tell the size of all."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """All that the page shows of a run."""

    name: str
    config: dict[str, Any]
    metrics: list[dict[str, float]]
    groups: list[PackedGroup]
    vocabulary: Vocabulary
    notices: list[str]


def write_page(run: Path, output: Path | None = None, *, max_rollouts: int = 10_000) -> Path:
    """Writes the page of a run directory and returns its path; by default RUN/inspect.html.

    Of a run with more than `max_rollouts` rollouts the page holds whole groups of every step up to
    about that number, and says so. Raises ValueError for a directory that is no run and for files
    that cannot be read.
    """
    if max_rollouts < 1:
        raise ValueError(f"max_rollouts={max_rollouts} shows nothing; give at least 1")
    record = read_run(run, max_rollouts=max_rollouts)
    output = output or run / "inspect.html"
    partial = output.with_suffix(".tmp")
    try:
        partial.write_text(page(record))
        partial.replace(output)
    except OSError as error:
        raise ValueError(f"{output} cannot be written: {error.strerror}") from None
    return output


def read_run(run: Path, *, max_rollouts: int) -> RunRecord:
    """Everything of a run directory, its rollouts packed."""
    if not run.is_dir():
        raise ValueError(f"{run} is not a directory; give the run.directory of a run")
    if not any((run / name).exists() for name in ("config.json", "metrics.jsonl", "rollouts")):
        raise ValueError(
            f"{run} holds no run: no config.json, metrics.jsonl or rollouts/; give the "
            "run.directory of a run"
        )
    config = read_config(run)
    metrics, cut_off = read_metrics(run)
    files = rollout_files(run)
    tokenizer, tried = load_tokenizer(run, config) if files else (None, [])
    vocabulary = Vocabulary(tokenizer)
    share = share_to_show(files, max_rollouts=max_rollouts)
    groups = [
        pack_group(group, other_texts(group, vocabulary))
        for group in read_groups(files, share=share)
    ]
    notices = []
    if cut_off:
        notices.append("The last line of metrics.jsonl was cut off and is left out.")
    if files and tokenizer is None:
        notices.append(no_tokenizer(tried))
    notices += missing_rollouts(metrics, {file.step for file in files})
    notices += sample_notice(groups, sum(file.num_rollouts for file in files))
    return RunRecord(
        name=run.absolute().name,
        config=config,
        metrics=metrics,
        groups=groups,
        vocabulary=vocabulary,
        notices=notices,
    )


def other_texts(group: RolloutGroup, vocabulary: Vocabulary) -> list[str | None]:
    """The text of each rollout, None where its tokens, with or without the end token, spell it."""

    def spelled(rollout: Rollout) -> bool:
        ids = rollout.response_ids
        return rollout.text in (vocabulary.spell(ids), vocabulary.spell(ids[:-1]))

    return [None if spelled(rollout) else rollout.text for rollout in group.rollouts]


def no_tokenizer(tried: list[str]) -> str:
    """Why the page shows token ids."""
    places = "; ".join(tried) or "the run has no model/ and its config.json no policy.model"
    return (
        f"No tokenizer could be loaded, so tokens are shown by their ids ({places}). Put the "
        "model's tokenizer files into model/ of the run directory and make the page again."
    )


def missing_rollouts(metrics: list[dict[str, float]], steps: set[int]) -> list[str]:
    """What the page says of steps that were trained and left no rollouts."""
    trained = [int(record["step"]) for record in metrics if record["step"] > 0]
    absent = sorted(set(trained) - steps)
    if not steps:
        return ["The run directory has no rollouts (rollouts/step-*.jsonl)."]
    return [f"No rollouts were found of these steps: {step_ranges(absent)}."] if absent else []


def sample_notice(groups: list[PackedGroup], num_rollouts: int) -> list[str]:
    """What the page says when it holds a part of the rollouts."""
    shown = sum(len(group.summary["sample"]) for group in groups)
    if shown == num_rollouts:
        return []
    return [
        f"This page holds {shown:,} of the run's {num_rollouts:,} rollouts: whole groups, the "
        "first of each step. The curves show everything."
    ]


def page(record: RunRecord) -> str:
    """The HTML text."""
    ids = IdTable(record.groups)
    names = list(dict.fromkeys(name for group in record.groups for name in group.series))
    mantissa = mantissa_that_fits(record.groups, names, ids)
    blobs = [encode_group(group, names, ids, mantissa) for group in record.groups]
    index = {
        "run": record.name,
        "config": record.config,
        "facts": list(config_facts(record.config)),
        "results": readable(list(last_values(record.metrics))),
        "metrics": readable(record.metrics),
        "notices": record.notices,
        "series": names,
        "mantissa": mantissa,
        "vocabulary": vocabulary_index(ids.ids.tolist(), record.vocabulary),
        "groups": [
            group.summary | {"promptTokens": len(group.prompt_ids), "blobs": list(map(len, texts))}
            for group, texts in zip(record.groups, blobs, strict=True)
        ],
    }
    return filled(
        title=html.escape(record.name),
        index=base64.b64encode(deflated_json(index)).decode(),
        blobs="".join(itertools.chain.from_iterable(blobs)),
    )


def mantissa_that_fits(groups: Sequence[PackedGroup], names: list[str], ids: IdTable) -> int:
    """How many bits of each number's mantissa fit into the page."""
    probed = groups[:: max(1, len(groups) // PROBED_GROUPS)]
    scale = len(groups) / max(len(probed), 1)
    for mantissa in MANTISSAS[:-1]:
        blobs = (encode_group(group, names, ids, mantissa) for group in probed)
        if sum(map(len, itertools.chain.from_iterable(blobs))) * scale <= BLOB_BUDGET:
            return mantissa
    return MANTISSAS[-1]


def vocabulary_index(ids: list[int], vocabulary: Vocabulary) -> dict[str, Any]:
    """Id and piece by place; a piece that is a part of a character is spelled in hex, by place."""
    texts: list[str | None] = []
    parts: dict[int, str] = {}
    for place, piece in enumerate(vocabulary.pieces(ids)):
        try:
            texts.append(None if piece is None else piece.decode())
        except UnicodeDecodeError:
            texts.append(None)
            parts[place] = (piece or b"").hex()
    return {"ids": ids, "texts": texts, "parts": parts}


def readable(value: Any) -> Any:
    """The value with the names of the numbers that JSON has not."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}Infinity"
    if isinstance(value, dict):
        return {key: readable(item) for key, item in value.items()}
    return [readable(item) for item in value] if isinstance(value, list | tuple) else value


def filled(**parts: str) -> str:
    """The template with the parts, the style and the scripts; nothing else may run or load."""
    style = "\n".join((ASSETS / f"{name}.css").read_text() for name in STYLES)
    script = "\n".join((ASSETS / f"{name}.js").read_text() for name in SCRIPTS)
    parts |= {"style": style, "style_hash": digest(style)}
    parts |= {"script": script, "script_hash": digest(script)}
    return SLOT.sub(lambda slot: parts[slot[1]], (ASSETS / "template.html").read_text())


def digest(text: str) -> str:
    """The hash by which the page's policy knows what belongs to it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
