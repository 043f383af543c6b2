"""What `train` would do: configuration, ranks, batches, memory, start; none of it is done."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.table import Table

from megatron_credit.batch.plan import plan_microbatches
from megatron_credit.mcore.architecture import data_parallel_size, read_architecture
from megatron_credit.mcore.memory import RankMemory
from megatron_credit.mcore.rank_layout import rank_places
from megatron_credit.trainer.checks import check_run
from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.load_config import section_types
from megatron_credit.trainer.loaded_run import check_loaded_run
from megatron_credit.trainer.prediction import MIB, Machine, Prediction, check_fits, predict, size
from megatron_credit.trainer.reference import shown
from megatron_credit.trainer.run_directory import RunDirectory
from megatron_credit.trainer.start import find_start
from megatron_credit.trainer.validate import describe_start

SHOWN_RANKS = 64
"""A longer table of ranks is cut."""


def show_plan(
    config: RunConfig,
    console: Console,
    *,
    record: Path | None = None,
    machine: Machine | None = None,
) -> None:
    """Prints the plan; starts nothing and writes nothing. ValueError as `run_locally` raises it.

    With a `record` of rollouts, of the run that trains on them.
    """
    checked = check_run(config) if record is None else check_loaded_run(config, record)
    resolved, report = checked.config, checked.questions["report"]
    directory = RunDirectory(config.run.directory)
    start = find_start(resolved, directory, questions=checked.questions)
    architecture = read_architecture(config.policy.model, config.policy.converter)
    prediction = predict(resolved, architecture, has_engine=record is None)
    context = resolved.engine.max_model_len or architecture.max_positions
    show_config(config, resolved, console)
    console.print("\n[bold]Ranks[/]")
    console.print(rank_table(resolved))
    console.print("\n[bold]Batches[/]")
    lines = batch_plan(resolved, context=context, num_prompts=num_prompts(report)).lines()
    for line in (*lines, *report["summary"]):
        console.print(f"  {line}", markup=False)
    console.print("\n[bold]Memory[/] (predicted, MiB a trainer rank)")
    console.print(memory_table(prediction))
    if prediction.engine_weights:
        console.print(f"  {engine_line(resolved, prediction, context)}")
    console.print(f"  {checkpoint_line(resolved, prediction)}")
    console.print(f"  {check_fits(resolved, prediction, machine or Machine.here())}")
    console.print("\n[bold]Start[/]")
    console.print(f"  {describe_start(start, directory)}", markup=False)
    console.print("nothing was started, nothing was written")


def show_config(given: RunConfig, resolved: RunConfig, console: Console) -> None:
    """Every key with its value: `*` where it is not the default, `+` where it was worked out."""
    console.print("[bold]Configuration[/] (* differs from the default, + was worked out)")
    before = {leaf.name: leaf.value for leaf in leaves(given)}
    for leaf in leaves(resolved):
        worked_out = before[leaf.name] != leaf.value
        mark = "+" if worked_out else " " if leaf.is_default else "*"
        console.print(f"{mark} {leaf.name} = {shown(leaf.value)}", markup=False)


@dataclass(frozen=True)
class Leaf:
    """A key of the configuration that holds no section."""

    name: str
    value: Any
    is_default: bool


def leaves(section: BaseModel, prefix: str = "") -> Iterator[Leaf]:
    """Everything below a section; sections that are absent are left out."""
    for name, field in type(section).model_fields.items():
        value, path = vars(section)[name], f"{prefix}{name}"
        parts = value if isinstance(value, tuple) else ()
        if isinstance(value, BaseModel):
            yield from leaves(value, f"{path}.")
        elif parts and isinstance(parts[0], BaseModel):
            for number, part in enumerate(parts):
                yield from leaves(part, f"{path}[{number}].")
        elif value is not None or not is_section(field):
            has_default = not field.is_required()
            default = field.get_default(call_default_factory=True) if has_default else None
            yield Leaf(path, value, has_default and value == default)


def is_section(field: FieldInfo) -> bool:
    """Whether the field holds a section, or may."""
    return bool(section_types(field.annotation))


def rank_table(config: RunConfig) -> Table:
    """Which rank holds what."""
    has_experts = config.parallel.expert * config.parallel.expert_tensor > 1
    axes = ["pp", "dp", "cp", "tp", *(["ep", "etp"] if has_experts else [])]
    table = Table("rank", *axes, box=None, pad_edge=True)
    places = rank_places(config.parallel, config.num_processes)
    for place in places[:SHOWN_RANKS]:
        table.add_row(str(place.rank), *(str(vars(place)[axis]) for axis in axes))
    if len(places) > SHOWN_RANKS:
        table.add_row("...", *[""] * len(axes))
    return table


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """How a step's rollouts become optimizer steps. Token counts are upper bounds: every sequence
    as long as the context."""

    prompts: int
    samples: int
    updates: int
    steps: int
    data_ranks: int
    context: int
    tokens_per_microbatch: int
    microbatches: int
    """Of an optimizer step on each data rank, at most."""
    epochs: float | None
    """How often the run goes through the prompts; None: they are generated."""

    @property
    def sequences(self) -> int:
        """Of a step."""
        return self.prompts * self.samples

    def lines(self) -> list[str]:
        """The arithmetic in words."""
        per_update = self.sequences // self.updates
        per_rank = -(-per_update // self.data_ranks)
        through = "" if self.epochs is None else f", {self.epochs:.2f} times through the prompts"
        return [
            f"a step: {self.prompts} prompts x {self.samples} samples = {self.sequences} "
            f"sequences, at most {self.sequences * self.context:,} tokens",
            f"an optimizer step: {per_update} sequences, up to {per_rank} on each of "
            f"{self.data_ranks} data ranks, at most {self.microbatches} micro-batches of "
            f"{self.tokens_per_microbatch} tokens each",
            f"the run: {self.steps} steps x {self.updates} = {self.steps * self.updates} optimizer "
            f"steps, {self.steps * self.prompts:,} prompts{through}",
        ]


def batch_plan(config: RunConfig, *, context: int, num_prompts: int | None) -> BatchPlan:
    """The arithmetic of a run; `num_prompts` there are to train on."""
    sizes = config.trainer
    data_ranks = data_parallel_size(config.parallel, config.num_processes)
    per_update = sizes.prompts_per_step * sizes.samples_per_prompt // sizes.updates_per_step
    interleaved = config.parallel.virtual_pipeline > 1
    bins = plan_microbatches(
        [context] * per_update,
        max_tokens=config.policy.tokens_per_microbatch,
        num_ranks=data_ranks,
        multiple_of=config.parallel.pipeline if interleaved else 1,
    )
    asked = sizes.steps * sizes.prompts_per_step
    return BatchPlan(
        prompts=sizes.prompts_per_step,
        samples=sizes.samples_per_prompt,
        updates=sizes.updates_per_step,
        steps=sizes.steps,
        data_ranks=data_ranks,
        context=context,
        tokens_per_microbatch=config.policy.tokens_per_microbatch,
        microbatches=len(bins[0]),
        epochs=asked / num_prompts if num_prompts else None,
    )


def num_prompts(report: dict[str, Any]) -> int | None:
    """Training prompts that a task's report counts; None where they are generated."""
    sources = report.get("sources", {})
    kept = [found["kept"] for name, found in sources.items() if name.startswith("train/")]
    return sum(kept) or None


def memory_table(prediction: Prediction) -> Table:
    """What a trainer rank of each stage needs."""
    used = [
        part
        for part in RankMemory.__dataclass_fields__
        if any(vars(stage)[part] for stage in prediction.stages)
    ]
    parts = (*used, "total")
    table = Table("ranks", box=None, pad_edge=True)
    for part in parts:
        table.add_column(part, justify="right")
    for number, stage in enumerate(prediction.stages):
        first = number * prediction.ranks_per_stage
        last = first + prediction.ranks_per_stage - 1
        ranks = f"{first}" if first == last else f"{first} .. {last}"
        values = {**vars(stage), "total": stage.total}
        table.add_row(ranks, *(f"{values[part] / MIB:,.1f}" for part in parts))
    return table


def checkpoint_line(config: RunConfig, prediction: Prediction) -> str:
    """What checkpoints need on the disk of the run's directory, and what that has."""
    root = config.run.directory.absolute()
    there = next(path for path in (root, *root.parents) if path.exists())
    free = shutil.disk_usage(there).free
    kept = config.checkpoint.keep_last
    more = ", those of checkpoint.keep_every apart" if config.checkpoint.keep_every else ""
    return (
        f"checkpoint: {size(prediction.checkpoint)} on the disk, with the last {kept} and one that "
        f"is being written {size((kept + 1) * prediction.checkpoint)}{more}; {size(free)} are free"
    )


def engine_line(config: RunConfig, prediction: Prediction, context: int) -> str:
    """What an engine rank needs."""
    each = prediction.sequence_cache
    room = config.engine.kv_cache_mib * MIB / each
    return (
        f"engine: {config.engine.tensor_parallel} ranks, {size(prediction.engine_weights)} of "
        f"weights each; KV cache {size(each)} for a sequence of {context} tokens (on a CPU "
        f"engine.kv_cache_mib={config.engine.kv_cache_mib} holds {room:.1f})"
    )
