"""Router replay on one rank: what the policy does with experts that it is told."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_credit.batch.sequence import TrainSequence

REPLAYED = ("qwen3_moe", "qwen3_moe_shares")


def with_experts(batch: list[TrainSequence], architecture: Any) -> list[TrainSequence]:
    """The sequences with random experts for most of their tokens; the last has none, as from an
    engine, and one in five neither."""
    generator = torch.Generator().manual_seed(13)
    routed = []
    for sequence in batch:
        length = len(sequence.token_ids_L)
        size = (length, architecture.num_layers, architecture.num_experts)
        order_LDE = torch.rand(size, generator=generator).argsort(dim=-1)
        expert_LDK = order_LDE[..., : architecture.experts_per_token].to(torch.int16)
        expert_LDK[torch.rand(length, generator=generator) < 0.2] = -1
        expert_LDK[-1] = -1
        routed.append(replace(sequence, routed_experts_LDK=expert_LDK))
    return routed


def run(directory: Path) -> dict[str, Any]:
    """Scores of each checkpoint with experts: by its own router, replayed, and of random experts;
    and the refusals."""
    from mcore.parity_worker import TEMPERATURE, make_batch

    from megatron_credit.mcore.config import OptimizerConfig, ParallelConfig, PolicyConfig
    from megatron_credit.mcore.parallel import start_parallel, stop_parallel
    from megatron_credit.mcore.policy import Policy

    results: dict[str, Any] = {}
    for kind in REPLAYED:
        parallel = ParallelConfig()
        ranks = start_parallel(parallel, seed=1, timeout_s=120)
        policy = Policy.build(
            policy=PolicyConfig(model=directory / kind, tokens_per_microbatch=64),
            optimizer=OptimizerConfig(kind="sgd"),
            parallel=parallel,
            ranks=ranks,
            seed=1,
        )
        batch = make_batch("mixed", policy.architecture.vocab_size)
        random = with_experts(batch, policy.architecture)
        own = [own_experts(policy, sequence) for sequence in batch]
        scores = {}
        for name, sequences, replayed in (
            ("own", batch, False),
            ("not replayed", random, False),
            ("replayed", own, True),
            ("random", random, True),
        ):
            policy.batching = replace(policy.batching, router_replay=replayed)
            scored = policy.score(sequences, temperature=TEMPERATURE)
            scores[name] = [one.logprob_T for one in scored]
        results[kind] = scores | {"sequences": [vars(sequence) for sequence in random]}
        results["refused"] = refusals(policy, random[0])
        stop_parallel(keep_world=True)
    results["bf16"] = routing_gap_of_bf16()
    return results


def routing_gap_of_bf16() -> dict[str, Any]:
    """Of a bfloat16 model: types of hidden states and weights of experts, and the largest
    difference of the weights from float32 arithmetic on the same hidden states."""
    from mcore.parity_worker import TEMPERATURE, Case, build, make_batch

    from megatron_credit.mcore.config import OptimizerConfig
    from megatron_credit.mcore.parallel import stop_parallel

    seen: list[tuple[Any, Tensor, Tensor]] = []

    def keep(router: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        seen.append((router, inputs[0].flatten(0, 1), output[0]))

    policy = build(Case("moe", dtype="bf16"), OptimizerConfig())
    for layer in policy.chunks[0].decoder.layers:
        layer.mlp.router.register_forward_hook(keep)
    policy.score(make_batch("single", policy.architecture.vocab_size), temperature=TEMPERATURE)
    gaps = []
    for router, hidden_PH, weight_PE in seen:
        logit_PE = hidden_PH.float() @ router.weight.float().T
        expert_PK = logit_PE.topk(policy.architecture.experts_per_token).indices
        expected_PK = logit_PE.gather(1, expert_PK).softmax(-1)
        expected_PE = torch.zeros_like(logit_PE).scatter(1, expert_PK, expected_PK)
        gaps.append((weight_PE - expected_PE).abs().max().item())
    stop_parallel(keep_world=True)
    types = {str(hidden_PH.dtype) for _, hidden_PH, _ in seen}
    return {"gap": max(gaps), "hidden": types, "weight": {str(w.dtype) for _, _, w in seen}}


def own_experts(policy: Any, sequence: TrainSequence) -> TrainSequence:
    """The sequence with the experts that the policy's routers choose for its tokens, in descending
    order of their weights; the last is forgotten, as by an engine."""
    from mcore.parity_worker import TEMPERATURE

    chosen: list[Tensor] = []

    def keep(_router: Any, _inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        weight_LE = output[0]
        chosen.append(weight_LE.topk(policy.architecture.experts_per_token).indices)

    layers = policy.chunks[0].decoder.layers
    hooks = [layer.mlp.router.register_forward_hook(keep) for layer in layers]
    policy.score([sequence], temperature=TEMPERATURE)
    for hook in hooks:
        hook.remove()
    expert_LDK = torch.stack(chosen, dim=1).to(torch.int16)
    expert_LDK[-1] = -1
    return replace(sequence, routed_experts_LDK=expert_LDK)


def refusals(policy: Any, sequence: TrainSequence) -> dict[str, str]:
    """The message of each refusal of wrong experts."""
    expert_LDK = sequence.routed_experts_LDK
    twice_LDK, partly_LDK, beyond_LDK = (expert_LDK.clone() for _ in range(3))
    twice_LDK[2, 1] = 1
    partly_LDK[0, 0, 1] = -1
    partly_LDK[0, 0, 0] = 2
    beyond_LDK[3, 2, 0] = policy.architecture.num_experts
    wrong = {
        "absent": None,
        "layers": expert_LDK[:, 1:],
        "twice": twice_LDK,
        "partly": partly_LDK,
        "beyond": beyond_LDK,
    }
    messages = {}
    for name, experts_LDK in wrong.items():
        try:
            policy.score([replace(sequence, routed_experts_LDK=experts_LDK)], temperature=1.0)
        except ValueError as error:
            messages[name] = str(error)
    return messages
