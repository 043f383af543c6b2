"""Everything that can be known of a run before it starts, all problems at once."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from rich.console import Console
from rich.markup import escape
from transformers import PreTrainedTokenizerBase

from megatron_credit.mcore.architecture import Architecture, check_parallel, read_architecture
from megatron_credit.tasks import Task
from megatron_credit.tasks.build import build_task
from megatron_credit.trainer import checks
from megatron_credit.trainer.check_credit import check_credit, check_prompts
from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.loggers import check_loggers
from megatron_credit.trainer.prediction import Machine, check_fits, predict
from megatron_credit.trainer.run_directory import RunDirectory
from megatron_credit.trainer.start import Start, find_start

Value = TypeVar("Value")
MARKS = {"ok": "[green]ok[/]     ", "problem": "[red]problem[/]", "skipped": "[yellow]skipped[/]"}
NAME_WIDTH = 10


@dataclass(frozen=True)
class Finding:
    """One line of the checklist."""

    name: str
    state: Literal["ok", "problem", "skipped"]
    text: str
    """What was found, what to do, or what it waits for."""


@dataclass
class Checklist:
    """Findings in order; a check that fails does not keep the others from being made."""

    findings: list[Finding] = field(default_factory=list)

    @property
    def fine(self) -> bool:
        """Whether nothing has to be changed."""
        return all(finding.state != "problem" for finding in self.findings)

    def check(
        self,
        name: str,
        action: Callable[..., tuple[Value, str]],
        *inputs: Any,
    ) -> Value | None:
        """What `action` finds in its inputs; None where it raises ValueError, or an input is None
        because its own check did."""
        if any(value is None for value in inputs):
            self.findings.append(Finding(name, "skipped", "waits for what is a problem above"))
            return None
        try:
            value, text = action(*inputs)
        except ValueError as error:
            self.findings.append(Finding(name, "problem", str(error)))
            return None
        self.findings.append(Finding(name, "ok", text))
        return value


def examine(config: RunConfig, machine: Machine | None = None) -> Checklist:
    """The checklist of a run on `machine`, by default this one; starts nothing, writes nothing."""
    found = Checklist()
    method = found.check("credit", credit, config)
    found.check("loggers", loggers, config)
    found.check("engine", engine, config)
    architecture = found.check("model", model, config)
    laid_out = found.check("layout", layout, config, architecture)
    if not config.policy.random_weights:
        found.check("weights", weights, config)
    tokenizer = found.check("tokenizer", load_tokenizer, config)
    found.check("vocabulary", vocabulary, config, tokenizer, architecture)
    task = found.check("data", read_data, config, tokenizer)
    try:
        sized = found.check("lengths", lengths, config, task, tokenizer, architecture)
        found.check("signals", signals, config, method, task)
        found.check("start", start, config, task)
    finally:
        if task is not None:
            task.close()
    # Without a length, the model's own bounds the KV cache of a sequence.
    known = config if sized is None else sized
    found.check("memory", memory, known, architecture, laid_out, machine or Machine.here())
    return found


def show(found: Checklist, console: Console) -> None:
    """Prints a line for each finding; those of more lines are indented."""
    margin = "\n" + " " * (len("problem ") + NAME_WIDTH + 1)
    for finding in found.findings:
        text = escape(finding.text).replace("\n", margin)
        console.print(f"{MARKS[finding.state]} {finding.name:<{NAME_WIDTH}} {text}")


def credit(config: RunConfig) -> tuple[str, str]:
    """The method and its options."""
    check_credit(config)
    return config.credit.method, config.credit.method


def signals(config: RunConfig, _method: str, task: Task) -> tuple[bool, str]:
    """What the method reads of the prompts is there."""
    lacking = check_prompts(config, checks.first_prompts(task))
    return True, "\n".join(lacking) or "the prompts have what the credit method reads"


def loggers(config: RunConfig) -> tuple[bool, str]:
    """What metrics are sent to."""
    check_loggers(config.loggers)
    return True, "installed"


def engine(config: RunConfig) -> tuple[bool, str]:
    """The engine to start, or the one that answers."""
    checks.check_engine(config)
    return True, config.engine.address or "one will be started on this machine"


def model(config: RunConfig) -> tuple[Architecture, str]:
    """What config.json describes."""
    found = read_architecture(config.policy.model, config.policy.converter)
    experts = f", {found.num_experts} experts" if found.num_experts else ""
    return found, (
        f"{found.family}, {found.num_layers} layers, hidden {found.hidden_size}{experts}, "
        f"vocabulary {found.vocab_size}, at most {found.max_positions} tokens"
    )


def layout(config: RunConfig, architecture: Architecture) -> tuple[bool, str]:
    """Whether the axes divide the model."""
    check_parallel(architecture, config.parallel, config.num_processes)
    checks.check_router_replay(config, architecture)
    axes = config.parallel.model_dump(exclude_defaults=True)
    shown = ", ".join(f"{name} {value}" for name, value in axes.items())
    return True, f"{config.num_processes} ranks" + (f": {shown}" if shown else "")


def weights(config: RunConfig) -> tuple[bool, str]:
    """The safetensors files are there."""
    checks.check_weights_exist(config.policy.model)
    files = sorted(config.policy.model.glob("*.safetensors"))
    total = sum(path.stat().st_size for path in files)
    return True, f"{len(files)} safetensors, {total / 1e6:,.1f} MB"


def load_tokenizer(config: RunConfig) -> tuple[PreTrainedTokenizerBase, str]:
    """It loads, can chat and ends."""
    found = checks.load_tokenizer(config.policy.model)
    return found, f"{len(found)} tokens, chat template, ends with {found.eos_token!r}"


def vocabulary(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, architecture: Architecture
) -> tuple[bool, str]:
    """The tokenizer's ids are rows of the embedding."""
    checks.check_vocabulary(tokenizer, architecture, config.policy.model)
    return True, "every token id is a row of the embedding"


def read_data(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[Task, str]:
    """All rows read, the verifiers loaded."""
    task = build_task(config.task, config.data, tokenizer=tokenizer, seed=config.run.seed)
    return task, "\n".join(task.report()["summary"])


def lengths(
    config: RunConfig, task: Task, tokenizer: PreTrainedTokenizerBase, architecture: Architecture
) -> tuple[RunConfig, str]:
    """The longest prompt and its response fit."""
    name, length = checks.longest_prompt(task, tokenizer)
    feedback = checks.feedback_tokens(config, task, tokenizer)
    positions = architecture.max_positions
    found = checks.with_context(config, (name, length), positions, feedback=feedback)
    return found, (
        f"longest prompt {length} + {config.sampling.max_new_tokens} new tokens"
        f"{checks.in_attempts(config, feedback)}, context {found.engine.max_model_len}"
    )


def start(config: RunConfig, task: Task) -> tuple[bool, str]:
    """Whether the run directory can be used, and what the run would go on from."""
    directory = RunDirectory(config.run.directory)
    found = find_start(config, directory, questions={"fingerprint": task.fingerprint()})
    return True, describe_start(found, directory)


def describe_start(found: Start, directory: RunDirectory) -> str:
    """Where the run would start, in words, and which checkpoints it would pass over."""
    if found.checkpoint is None:
        return f"step 0, in {directory.root}"
    return "\n  ".join([f"goes on from {found.checkpoint}", *found.remarks])


def memory(
    config: RunConfig, architecture: Architecture, _laid_out: bool, machine: Machine
) -> tuple[bool, str]:
    """Whether trainer and engine fit into the machine."""
    return True, check_fits(config, predict(config, architecture), machine)
