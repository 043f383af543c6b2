"""Tiny models, a started engine, and comparisons of what it samples with a plain forward pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from mcore.tiny_models import published
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from megatron_credit.rollouts import vllm_api
from megatron_credit.rollouts.buckets import Piece
from megatron_credit.rollouts.client import EngineClient, GenerateRequest
from megatron_credit.rollouts.config import EngineConfig
from megatron_credit.rollouts.engine_log import EngineLog
from megatron_credit.rollouts.server import EngineServer
from megatron_credit.rollouts.sync import WeightSync

STOP = 7
CONFIG = EngineConfig(
    dtype="float32",
    max_model_len=320,
    kv_cache_mib=64,
    request_timeout_s=60,
    sync_timeout_s=30,
    bucket_mib=1,
)
SIZES = {
    "vocab_size": 384,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


class OneSync:
    """The weight sync of one engine, which raises what goes wrong."""

    def __init__(self, client: EngineClient, config: EngineConfig) -> None:
        self._client = client
        self._sync = WeightSync(config)

    def send(self, metadata, weights, *, version) -> int:
        """The bytes that were sent."""
        failed = self._sync.send([self._client], metadata, weights, version=version)
        for error in failed.values():
            raise error
        return sum(piece.num_bytes for piece in metadata)


class Engine(NamedTuple):
    """A started engine and who speaks to it."""

    server: EngineServer
    client: EngineClient
    sync: OneSync


def dense_model(**changes):
    torch.manual_seed(0)
    return uneven(Qwen3ForCausalLM(Qwen3Config(**(SIZES | {"intermediate_size": 256} | changes))))


def expert_model():
    torch.manual_seed(0)
    return uneven(
        Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **SIZES,
                intermediate_size=256,
                moe_intermediate_size=64,
                num_experts=8,
                num_experts_per_tok=2,
                norm_topk_prob=True,
                tie_word_embeddings=False,
            )
        )
    )


def uneven(model):
    """With numbers large enough to make the distributions uneven."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return model.float().eval()


@contextmanager
def started(
    model, path: Path, config: EngineConfig = CONFIG, *, routed_experts: bool = False
) -> Iterator[Engine]:
    model.save_pretrained(path / "model")
    log = path / "engine.log"
    server = EngineServer.start(
        path / "model", config, log_path=log, seed=0, routed_experts=routed_experts
    )
    try:
        server.wait_ready(400)
        client = EngineClient(
            server.address,
            request_timeout_s=config.request_timeout_s,
            log=EngineLog(log),
            api_key=server.api_key,
        )
        client.wait_ready(10)
        yield Engine(server, client, OneSync(client, config))
        client.close()
    finally:
        server.stop()


def core_of(server: EngineServer) -> psutil.Process:
    """The process that computes."""
    below = psutil.Process(server.pid).children(recursive=True)
    return next(process for process in below if "EngineCore" in process.name())


def request(prompt, **changes) -> GenerateRequest:
    fields = {
        "prompt_ids": prompt,
        "num_samples": 2,
        "temperature": 1.0,
        "max_new_tokens": 12,
        "stop_token_ids": (STOP,),
        "seed": 11,
    }
    return GenerateRequest(**(fields | changes))


def generate_disturbed(client, requests, disturb):
    """The answers; `disturb` is called when a short request, asked after them, is done."""
    short = request([9], num_samples=1, max_new_tokens=20, stop_token_ids=(383,))
    *asked, last = [client.begin_generate(one) for one in [*requests, short]]
    last.result()
    disturb()
    return [vllm_api.completions(one.result()) for one in asked]


def reference_logprobs(model, prompt, completion, temperature=1.0):
    ids = torch.tensor([list(prompt) + completion.token_ids])
    with torch.no_grad():
        logprob_TV = torch.log_softmax(model(ids).logits[0] / temperature, -1)
    rows = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
    return logprob_TV[rows, ids[0, len(prompt) :]]


def largest_gap(model, client, requests, temperature=1.0) -> float:
    """Between the engine's log-probs and the model's, in nats."""
    gaps = []
    for one, samples in zip(requests, client.generate(requests), strict=True):
        for sample in samples:
            expected_T = reference_logprobs(model, one.prompt_ids, sample, temperature)
            gaps.append((torch.tensor(sample.logprobs) - expected_T).abs().max().item())
    return max(gaps)


def chosen_experts(model, token_ids) -> tuple[torch.Tensor, torch.Tensor]:
    """int16, [tokens, layers, experts per token]: where the model's routers send these tokens; and
    the routers' logits, [tokens, layers, experts]."""
    found = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _gate, _inputs, output: found.append(output))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(torch.tensor([token_ids]))
    for hook in hooks:
        hook.remove()
    chosen_LDK = torch.stack([expert_LK for _, _, expert_LK in found], dim=1).to(torch.int16)
    return chosen_LDK, torch.stack([logit_LE for logit_LE, _, _ in found], dim=1)


def perturb(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def checkpoint_tensors(model) -> list[tuple[str, torch.Tensor]]:
    """The weights as a checkpoint has them: one tensor an expert, a tied head not at all."""
    return [(name, tensor.detach()) for name, tensor in published(model.named_parameters())]


def announced(tensors) -> list[Piece]:
    return [Piece(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors]


def send(sync, tensors, version) -> int:
    return sync.send(announced(tensors), iter(tensors), version=version)
