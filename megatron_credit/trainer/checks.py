"""What can be known before any process is started: files, sizes, names that must fit together."""

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_credit.batch.rollout import Prompt
from megatron_credit.data.chat import encode_prompt
from megatron_credit.mcore.architecture import Architecture, check_parallel, read_architecture
from megatron_credit.rollouts.server import is_healthy, require_free
from megatron_credit.tasks import Task
from megatron_credit.tasks.build import build_task
from megatron_credit.trainer.check_credit import check_credit, check_prompts
from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.feedback_turn import read_feedback_turn
from megatron_credit.trainer.loggers import check_loggers
from megatron_credit.trainer.sampler import stop_tokens

LOOKED_AT = 64
"""Prompts in which it is checked that they have what the credit method reads."""
CONTEXT_MULTIPLE = 64
"""A context that is not given is rounded up to a multiple of this many tokens."""


@dataclass(frozen=True)
class CheckedRun:
    """A run that can start."""

    config: RunConfig
    """With the values that follow from the model and the data filled in."""
    questions: dict[str, Any]
    """`fingerprint` of the prompts and answers, and under `report` what was left out of them."""
    remarks: tuple[str, ...] = ()
    """What a person should know before it starts, a line each."""


def check_run(config: RunConfig) -> CheckedRun:
    """The run with its open values filled in; ValueError at the first thing that would fail later.

    Reads the model's files and the data; starts no engine and no trainer, and writes nothing.
    """
    check_credit(config)
    check_loggers(config.loggers)
    check_engine(config)
    architecture = read_architecture(config.policy.model, config.policy.converter)
    check_parallel(architecture, config.parallel, config.num_processes)
    check_router_replay(config, architecture)
    if not config.policy.random_weights:
        check_weights_exist(config.policy.model)
    tokenizer = load_tokenizer(config.policy.model)
    check_vocabulary(tokenizer, architecture, config.policy.model)
    task = build_task(config.task, config.data, tokenizer=tokenizer, seed=config.run.seed)
    try:
        longest = longest_prompt(task, tokenizer)
        feedback = feedback_tokens(config, task, tokenizer)
        config = with_context(config, longest, architecture.max_positions, feedback=feedback)
        report = task.report()
        remarks = [
            *report["summary"],
            *evaluation_remarks(config, len(task.eval_prompts())),
            *check_prompts(config, first_prompts(task)),
        ]
        questions = {"fingerprint": task.fingerprint(), "report": report}
    finally:
        task.close()
    return CheckedRun(config, questions, tuple(remarks))


def first_prompts(task: Task) -> list[Prompt]:
    """Some prompts, to see what they have."""
    return [task.train_prompt(index) for index in range(LOOKED_AT)]


def evaluation_remarks(config: RunConfig, num_held_out: int) -> list[str]:
    """Says that accuracy will not be measured although it is asked for."""
    if num_held_out or not config.evaluation.every:
        return []
    return ["no held-out prompts, so no evaluations; set data.eval or data.eval_size for them"]


def check_engine(config: RunConfig) -> None:
    """A group fits into the engine; there is a vLLM to start, and the port for it is free."""
    if config.trainer.samples_per_prompt > config.engine.max_num_seqs:
        raise ValueError(
            f"trainer.samples_per_prompt={config.trainer.samples_per_prompt} is above "
            f"engine.max_num_seqs={config.engine.max_num_seqs}; raise the latter"
        )
    if config.engine.address is not None:
        if not is_healthy(config.engine.address):
            raise ValueError(
                f"engine.address={config.engine.address}: no vLLM server answers there; start it, "
                "or leave the address out to have one started"
            )
        return
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(
            "vLLM is not installed, so no engine can be started; run scripts/setup-env (CPU), "
            "install megatron-credit[gpu], or set engine.address to a server that runs already"
        )
    if config.engine.port:
        require_free(config.engine.port)


def check_router_replay(config: RunConfig, architecture: Architecture) -> None:
    """There are experts whose choice can be replayed."""
    if config.policy.router_replay and not architecture.num_experts:
        raise ValueError(
            f"policy.router_replay = true, but {config.policy.model} has no experts; turn it off"
        )


def check_weights_exist(model: Path) -> None:
    """The directory holds safetensors weights."""
    index = model / "model.safetensors.index.json"
    if index.is_file():
        shards = set(json.loads(index.read_text())["weight_map"].values())
        missing = sorted(name for name in shards if not (model / name).is_file())
        if missing:
            raise ValueError(f"{model}: the index names {', '.join(missing)}, which do not exist")
    elif not (model / "model.safetensors").is_file():
        raise ValueError(
            f"{model} holds no model.safetensors and no model.safetensors.index.json; convert the "
            "weights to safetensors, or set policy.random_weights = true to start from noise"
        )


def load_tokenizer(model: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of the model directory; ValueError when it is missing or cannot chat."""
    if not any((model / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise ValueError(f"{model} holds no tokenizer.json; copy the model's tokenizer files there")
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{model}: the tokenizer does not load: {error}") from None
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{model}: the tokenizer has no chat template; add one to tokenizer_config.json"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{model}: the tokenizer has no eos_token; name one, or no response ends")
    return tokenizer


def check_vocabulary(
    tokenizer: PreTrainedTokenizerBase, architecture: Architecture, model: Path
) -> None:
    """Every token id of the tokenizer is a row of the embedding."""
    largest = max(tokenizer.get_vocab().values())
    if largest >= architecture.vocab_size:
        raise ValueError(
            f"{model}: the tokenizer has token ids up to {largest}, but vocab_size is "
            f"{architecture.vocab_size}; these files do not belong together"
        )


def longest_prompt(task: Task, tokenizer: PreTrainedTokenizerBase) -> tuple[str, int]:
    """Id and tokens of the longest prompt."""
    prompts = task.longest_prompts()
    lengths = {prompt.id: len(encode_prompt(tokenizer, prompt)) for prompt in prompts}
    longest = max(lengths, key=lengths.__getitem__)
    return longest, lengths[longest]


def feedback_tokens(config: RunConfig, task: Task, tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens of all feedback in a rollout; ValueError where the chat template takes none."""
    if config.attempts is None:
        return 0
    stop = stop_tokens(tokenizer, config.sampling)
    prompt = task.longest_prompts()[0]
    turn = read_feedback_turn(tokenizer, prompt, config.attempts.feedback, stop)
    return (config.attempts.max_attempts - 1) * len(turn.token_ids)


def with_context(
    config: RunConfig, longest: tuple[str, int], max_positions: int, *, feedback: int = 0
) -> RunConfig:
    """The configuration with `engine.max_model_len` set; ValueError where prompts do not fit.

    `feedback`: tokens between the attempts of a rollout.
    """
    name, length = longest
    new = config.max_attempts * config.sampling.max_new_tokens + feedback
    needed = length + new
    asked = config.engine.max_model_len
    if asked is not None and asked > max_positions:
        raise ValueError(
            f"engine.max_model_len={asked} is above the model's max_position_embeddings="
            f"{max_positions}; lower it"
        )
    rounded = -(-needed // CONTEXT_MULTIPLE) * CONTEXT_MULTIPLE
    context = asked or min(rounded, max_positions)
    if needed > context:
        limit = f"engine.max_model_len={asked}; raise it" if asked else f"the model has {context}"
        raise ValueError(
            f"prompt {name!r} has {length} tokens; with sampling.max_new_tokens="
            f"{config.sampling.max_new_tokens}{in_attempts(config, feedback)} it needs {needed}, "
            f"but {limit}, or allow at most {allowed_tokens(config, context - length - feedback)} "
            "new tokens, or leave out long prompts by data.max_prompt_tokens"
        )
    engine = config.engine.model_copy(update={"max_model_len": context})
    return config.model_copy(update={"engine": engine})


def in_attempts(config: RunConfig, feedback: int) -> str:
    """What several attempts add to an explanation of lengths; nothing for one."""
    if config.attempts is None:
        return ""
    return f" in each of {config.max_attempts} attempts and {feedback} tokens of feedback"


def allowed_tokens(config: RunConfig, room: int) -> int:
    """New tokens that an attempt may have."""
    return max(room // config.max_attempts, 0)
