"""All of vLLM's naming that may move with its next release (now 0.32): arguments, paths, JSON."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_credit.batch.rollout import Completion, VersionSpan
from megatron_credit.rollouts.config import EngineConfig

HEALTH = "/health"
PULSE = "/is_paused"
"""The process that computes answers this one itself; the server answers HEALTH without it."""
GENERATE = "/inference/v1/generate"
VERSION = "/weight_info"
RESET_CACHE = "/reset_prefix_cache"
RESET_CACHE_OF_ALL = "/reset_prefix_cache?reset_running_requests=true"
"""Running requests are read again, with the weights of then."""
PAUSE = "/pause?mode=keep&clear_cache=false"
RESUME = "/resume"
INIT_TRANSFER = "/init_weight_transfer_engine"
LEAVE_TRANSFER = "/shutdown_weight_transfer_engine"
START_UPDATE = "/start_weight_update"
UPDATE = "/update_weights"
FINISH_UPDATE = "/finish_weight_update"

PREFILL_TOKENS = 8192
"""Prompt tokens that a CPU engine reads in one step."""

OUT_OF_MEMORY = (
    "out of memory",
    "OutOfMemoryError",
    "MemoryError",
    "can't allocate memory",
    "Cannot allocate memory",
    "bad_alloc",
    "desired GPU memory utilization",
    "No available memory for the cache blocks",
    "KV cache is needed",
    "requested memory for kv",
)
"""Of CUDA, torch, Python, the C++ library, and vLLM where it plans its cache."""

DEFAULT_VERSION = "default"
"""What vLLM calls the weights that it loaded itself."""


def server_command(
    model_dir: Path,
    config: EngineConfig,
    *,
    port: int,
    seed: int,
    backend: str,
    host: str = "127.0.0.1",
    routed_experts: bool = False,
) -> list[str]:
    """The command line of a server; with `routed_experts`, its answers say which experts each
    token went to."""
    options = {
        "model": str(model_dir),
        "served-model-name": "policy",
        "host": host,
        "port": port,
        "dtype": config.dtype,
        "max-model-len": config.max_model_len,
        "max-num-seqs": config.max_num_seqs,
        "tensor-parallel-size": config.tensor_parallel,
        "seed": seed,
        # The default reports log-probs before the temperature, nats away from the sampled ones.
        "logprobs-mode": "processed_logprobs",
        "weight-transfer-config": json.dumps({"backend": backend}),
        "middleware": "megatron_credit.rollouts.guard.RequireKey",
        "uvicorn-log-level": "warning",
    }
    if backend == "gloo":
        # Importing it registers the backend in every worker.
        options["worker-extension-cls"] = "megatron_credit.rollouts.gloo_worker.WorkerExtension"
        options["kv-cache-memory-bytes"] = config.kv_cache_mib << 20
        options["max-num-batched-tokens"] = max(PREFILL_TOKENS, config.max_model_len)
        if config.tensor_parallel == 1:
            # The model in the engine's own process: no second hop for each step and each sync.
            options["distributed-executor-backend"] = "uni"
    else:
        options["gpu-memory-utilization"] = config.gpu_memory
    switches = ["enable-scale-out", "skip-tokenizer-init", "disable-log-stats"]
    if backend == "gloo":
        # Compiling costs 20 s and gains a tenth on a CPU. A seeded request whose prompt is split
        # over two steps kills a CPU engine ("CPU Generator does not use offset").
        switches += ["enforce-eager", "no-enable-chunked-prefill"]
    if routed_experts:
        recorders, switch = _routed_experts(config, backend)
        options |= recorders
        switches.append(switch)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += [f"--{name}={value}" for name, value in options.items()]
    return command + [f"--{name}" for name in switches]


def _routed_experts(config: EngineConfig, backend: str) -> tuple[dict[str, str], str]:
    """Options and switch of a server that says which experts each token went to."""
    if backend != "gloo":
        return {}, "enable-return-routed-experts"
    if config.tensor_parallel > 1:
        raise ValueError(
            f"engine.tensor_parallel={config.tensor_parallel}: a CPU engine returns routed experts "
            "with 1 only; lower it, or turn policy.router_replay off"
        )
    module = "megatron_credit.rollouts.cpu_routing."
    # What a prompt shares with an earlier one would not be read, and so not be routed, again.
    return {
        "worker-cls": module + "RecordingWorker",
        "scheduler-cls": module + "RecordingScheduler",
    }, "no-enable-prefix-caching"


def server_environment(backend: str, *, host: str = "127.0.0.1") -> dict[str, str]:
    """Environment of a server that listens on `host`, on top of ours."""
    environment = {
        # Control endpoints exist in development mode only.
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        # Its processes, all of one machine, talk to each other over loopback, and where they ask
        # for an address that others reach, it is the one that the server has anyway.
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_HOST_IP": host,
        "VLLM_LOOPBACK_IP": "127.0.0.1",
        # With it, requests may bring pickles.
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
    }
    if backend == "gloo":
        environment |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # Otherwise vLLM overrides the "uni" executor.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # The sampler asks for a compiled helper even in eager mode: seconds of the first step.
            "TORCHDYNAMO_DISABLE": "1",
        }
    return environment


def generate_request(
    prompt_ids: Sequence[int],
    *,
    num_samples: int,
    temperature: float,
    max_new_tokens: int,
    stop_token_ids: Sequence[int],
    seed: int,
) -> dict[str, Any]:
    """Body of a GENERATE call; temperature 0 is greedy."""
    return {
        "token_ids": list(prompt_ids),
        "sampling_params": {
            "n": num_samples,
            "temperature": temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "max_tokens": max_new_tokens,
            "stop_token_ids": list(stop_token_ids),
            "ignore_eos": True,  # the stop tokens decide, not what the model directory says
            "seed": seed,
            "logprobs": 0,
            "detokenize": False,
        },
    }


def completions(body: dict[str, Any]) -> list[Completion]:
    """The samples in a GENERATE answer, in order."""
    return [
        Completion(
            token_ids=choice["token_ids"],
            logprobs=[entry["logprob"] for entry in choice["logprobs"]["content"]],
            finish_reason=choice["finish_reason"],
            versions=[
                VersionSpan(version_number(span["version"]), span["start"], span["end"])
                for span in choice["weight_versions"] or ()
            ],
            routed_experts=choice["routed_experts"] or "",
        )
        for choice in sorted(body["choices"], key=lambda choice: choice["index"])
    ]


def cache_was_reset(answer: Any) -> bool:
    """Whether a RESET_CACHE call had its effect; it has none while requests run."""
    return answer == {"success": True}


def version_number(label: str) -> int:
    """Our version number of vLLM's label; -1 for weights that it loaded itself."""
    return -1 if label == DEFAULT_VERSION else int(label)


def is_core_error(line: str) -> bool:
    """Whether a line of the log is an error of the process that computes."""
    return line.startswith(("(EngineCore", "(Worker")) and " ERROR " in line


def is_out_of_memory(line: str) -> bool:
    """Whether an error says that memory was short, or that what is configured will not fit."""
    return any(words in line for words in OUT_OF_MEMORY)


def update_info(names: list[str], dtypes: list[str], shapes: list[list[int]]) -> dict[str, Any]:
    """Body of an UPDATE call."""
    return {"update_info": {"names": names, "dtype_names": dtypes, "shapes": shapes}}
