"""What can be known before any process is started: files, sizes, names that must fit together."""

import importlib.util
import json
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_credit.credit import METHODS
from megatron_credit.mcore.architecture import Architecture, check_parallel, read_architecture
from megatron_credit.rollouts.server import is_healthy, require_free
from megatron_credit.tasks import build_task
from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.sampler import encode_prompt

COMPUTED_SIGNALS = ("policy_logprob_NT",)
"""Fields of `credit.Group` that a run can fill in besides rewards and masks."""
SAMPLED_PROMPTS = 256
"""Training prompts whose length is looked at before the start."""


def check_run(config: RunConfig) -> None:
    """Raises ValueError at the first thing that would fail later.

    Reads the model's files and a sample of prompts; starts nothing and writes nothing.
    """
    check_credit(config)
    check_engine(config)
    architecture = read_architecture(config.policy.model)
    check_parallel(architecture, config.parallel, config.num_processes)
    if not config.policy.random_weights:
        check_weights_exist(config.policy.model)
    tokenizer = load_tokenizer(config.policy.model)
    check_vocabulary(tokenizer, architecture, config.policy.model)
    check_lengths(config, tokenizer, architecture)


def check_credit(config: RunConfig) -> None:
    """The method exists, its options are valid and its signals can be computed."""
    method = METHODS.get(config.credit.method)
    if method is None:
        raise ValueError(
            f"credit.method={config.credit.method!r} is unknown; use one of {', '.join(METHODS)}"
        )
    method.configure(config.credit.options)
    missing = [name for name in method.needs if name not in COMPUTED_SIGNALS]
    if missing:
        raise ValueError(
            f"credit.method={config.credit.method!r} needs {', '.join(missing)}, which this "
            "version computes only outside of a run"
        )


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


def check_lengths(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, architecture: Architecture
) -> None:
    """Prompts with their responses fit into the engine's context, and that into the model's."""
    context = config.engine.max_model_len
    if context > architecture.max_positions:
        raise ValueError(
            f"engine.max_model_len={context} is above the model's max_position_embeddings="
            f"{architecture.max_positions}; lower it"
        )
    task = build_task(config.task)
    prompts = [
        *task.eval_prompts(),
        *(task.train_prompt(index) for index in range(SAMPLED_PROMPTS)),
    ]
    lengths = {prompt.id: len(encode_prompt(tokenizer, prompt)) for prompt in prompts}
    longest = max(lengths, key=lengths.__getitem__)
    needed = lengths[longest] + config.sampling.max_new_tokens
    if needed > context:
        raise ValueError(
            f"prompt {longest!r} has {lengths[longest]} tokens; with sampling.max_new_tokens="
            f"{config.sampling.max_new_tokens} it needs {needed}, but engine.max_model_len="
            f"{context}; raise it, or allow at most {context - lengths[longest]} new tokens"
        )
