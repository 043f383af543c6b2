"""An engine that samples and no trainer: what `rollout` and `eval` have in common."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from transformers import PreTrainedTokenizerBase

from megatron_credit.mcore.architecture import read_architecture
from megatron_credit.mcore.manifest import MANIFEST
from megatron_credit.rollouts.client import EngineClient
from megatron_credit.rollouts.engine_log import EngineLog
from megatron_credit.rollouts.errors import EngineError
from megatron_credit.rollouts.server import EngineServer
from megatron_credit.tasks.base import Task
from megatron_credit.tasks.build import build_task
from megatron_credit.trainer.checks import (
    check_engine,
    check_vocabulary,
    check_weights_exist,
    feedback_tokens,
    load_tokenizer,
    longest_prompt,
    with_context,
)
from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.run_directory import RunDirectory, lock_directory
from megatron_credit.trainer.sampler import Sampler
from megatron_credit.trainer.worker_environment import engine_key


@dataclass(frozen=True)
class Weights:
    """What is to be sampled from."""

    path: Path
    """As a person reads it: the model directory or the checkpoint."""
    model: Path
    """Hugging Face directory with the tokenizer and, unless there is a checkpoint, the weights."""
    checkpoint: Path | None = None
    """Training checkpoint that holds the weights instead."""


def find_weights(config: RunConfig, given: str | None) -> Weights:
    """The weights of this name: a model directory, a checkpoint, or the step-000010 of the run.

    Without a name, those of policy.model. ValueError where there are none, or where the engine is
    one that has its own.
    """
    if given is None:
        if config.policy.random_weights:
            raise ValueError(
                "policy.random_weights = true: there are no weights to sample from; name a model "
                "or a checkpoint by --model"
            )
        return Weights(config.policy.model, config.policy.model)
    if config.engine.address is not None:
        raise ValueError(
            f"engine.address={config.engine.address} serves weights of its own; leave out "
            f"{given!r}, or take engine.address out of the configuration"
        )
    directory = RunDirectory(config.run.directory)
    for path in (Path(given), directory.checkpoints / given):
        if (path / MANIFEST).is_file():
            return Weights(path, config.policy.model, path.absolute())
        if (path / "config.json").is_file():
            return Weights(path, path)
    kept = ", ".join(directory.checkpoint(step).name for step in directory.checkpoint_steps())
    raise ValueError(
        f"{given} is no model directory (with config.json) and no complete checkpoint; "
        f"{directory.checkpoints} has {kept or 'none'}"
    )


@dataclass(frozen=True)
class Questions:
    """A task whose prompts fit into the model, in the model's tokens."""

    config: RunConfig
    """With the engine's context filled in, and `policy.model` the directory of `weights`."""
    weights: Weights
    task: Task
    tokenizer: PreTrainedTokenizerBase


@contextmanager
def open_questions(config: RunConfig, weights: Weights) -> Iterator[Questions]:
    """Checks all that can be known before an engine is started; ValueError where it cannot work."""
    policy = config.policy.model_copy(update={"model": weights.model})
    config = config.model_copy(update={"policy": policy})
    check_engine(config)
    architecture = read_architecture(weights.model, config.policy.converter)
    if weights.checkpoint is None and config.engine.address is None:
        check_weights_exist(weights.model)
    tokenizer = load_tokenizer(weights.model)
    check_vocabulary(tokenizer, architecture, weights.model)
    task = build_task(config.task, config.data, tokenizer=tokenizer, seed=config.run.seed)
    try:
        longest, feedback = (
            longest_prompt(task, tokenizer),
            feedback_tokens(config, task, tokenizer),
        )
        config = with_context(config, longest, architecture.max_positions, feedback=feedback)
        yield Questions(config, weights, task, tokenizer)
    finally:
        task.close()


@contextmanager
def open_sampler(questions: Questions, *, log: Path) -> Iterator[Sampler]:
    """A sampler whose engine serves the weights and writes this log; it is gone afterwards."""
    config = questions.config
    with ExitStack() as stack:
        address, key = config.engine.address, engine_key()
        if address is None:
            model = stack.enter_context(served_directory(questions.weights, scratch=log.parent))
            server = stack.enter_context(running_engine(config, model, log=log))
            address, key = server.address, server.api_key
        client = EngineClient(
            address,
            request_timeout_s=config.engine.request_timeout_s,
            log=EngineLog(log),
            api_key=key,
        )
        stack.callback(client.close)
        client.wait_ready(config.engine.startup_timeout_s)
        yield Sampler(
            task=questions.task,
            tokenizer=questions.tokenizer,
            engine=client,
            sampling=config.sampling,
            attempts=config.attempts,
            seed=config.run.seed,
        )


@contextmanager
def served_directory(weights: Weights, *, scratch: Path) -> Iterator[Path]:
    """A Hugging Face directory of the weights; that of a checkpoint is deleted afterwards."""
    if weights.checkpoint is None:
        yield weights.model
        return
    from megatron_credit.mcore.conversion import checkpoint_to_hf

    with TemporaryDirectory(prefix=".exported-", dir=scratch) as directory:
        exported = Path(directory) / "model"
        checkpoint_to_hf(weights.checkpoint, weights.model, exported)
        yield exported


@contextmanager
def running_engine(config: RunConfig, model: Path, *, log: Path) -> Iterator[EngineServer]:
    """An engine that serves; ValueError where it cannot start."""
    server = EngineServer.start(
        model,
        config.engine,
        log_path=log,
        seed=config.run.seed,
        routed_experts=config.policy.router_replay,
    )
    try:
        try:
            server.wait_ready(config.engine.startup_timeout_s)
        except EngineError as error:
            raise ValueError(f"the engine cannot start: {error}") from None
        yield server
    finally:
        server.stop()


@contextmanager
def locked_output(directory: Path) -> Iterator[IO[str]]:
    """The directory, created, and kept for this process; ValueError where that fails."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = lock_directory(directory, otherwise="name another --output")
    except OSError as error:
        raise ValueError(
            f"--output {directory} cannot be written to ({error.strerror}); name another place"
        ) from None
    with lock:
        yield lock
