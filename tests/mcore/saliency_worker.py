"""What every rank of the tests of saliency runs: one world, one layout after another."""

from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from mcore import replay_checks
from torch import Tensor

from megatron_credit.batch.sequence import TrainSequence
from megatron_credit.mcore import cpu_mode
from megatron_credit.mcore.config import OptimizerConfig, ParallelConfig, PolicyConfig
from megatron_credit.objective.config import ObjectiveConfig

TEMPERATURE = 0.8
DENSE, TIED, LLAMA, EXPERTS = "qwen3_odd_vocab", "qwen3_tied", "llama", "qwen3_moe"
LEAVES = ("embedding", "first", "middle", "last")
EVERY = tuple((leaf, align) for leaf in LEAVES for align in ("predictor", "token"))
SOME = (("embedding", "predictor"), ("middle", "token"))


@dataclass(frozen=True)
class Case:
    """One layout of one model; results of equal `model` must agree."""

    parallel: dict[str, Any] = field(default_factory=dict)
    model: str = DENSE
    bound: int = 40
    """Tokens of a micro-batch: several of them, some with several sequences."""
    asked: tuple[tuple[str, str], ...] = EVERY
    dtype: Literal["fp32", "bf16"] = "fp32"
    recompute: Literal["none", "full"] = "none"
    trains: bool = False
    """Also what an update and the state around it make of a pass in between."""


TP2, PP2, CP2 = {"tensor": 2}, {"pipeline": 2}, {"context": 2}
SP, VPP2, EP2 = {"sequence_parallel": True}, {"virtual_pipeline": 2}, {"expert": 2}
CASES: dict[int, dict[str, Case]] = {
    1: {
        "one": Case(trains=True),
        "tied": Case(model=TIED, asked=SOME),
        "llama": Case(model=LLAMA, asked=SOME),
        "moe": Case(model=EXPERTS),
        # The other extremes of packing: every sequence alone, and everything in one micro-batch.
        "alone": Case(bound=1, asked=SOME),
        "together": Case(bound=10_000, asked=SOME),
        "recompute": Case(recompute="full"),
        "recompute_moe": Case(model=EXPERTS, recompute="full", asked=SOME),
        "bf16": Case(dtype="bf16", asked=SOME, trains=True),
    },
    2: {
        "tp2": Case(TP2, trains=True),
        "tp2_sp": Case(TP2 | SP, trains=True),
        "pp2": Case(PP2),
        # More micro-batches in flight than stages.
        "pp2_alone": Case(PP2, bound=1, asked=SOME),
        "pp2_tied": Case(PP2, TIED, asked=SOME, trains=True),
        "pp2_vpp2": Case(PP2 | VPP2, bound=24, trains=True),
        "pp2_vpp2_recompute": Case(PP2 | VPP2, recompute="full"),
        "cp2": Case(CP2, trains=True),
        "dp2": Case(trains=True),
        "dp2_together": Case(bound=10_000, asked=SOME),
        "ep2_moe": Case(EP2, EXPERTS, trains=True),
        "cp2_moe": Case(CP2, EXPERTS, asked=SOME),
        "tp2_sp_moe": Case(TP2 | SP, EXPERTS, asked=SOME),
        "pp2_bf16": Case(PP2, dtype="bf16", asked=SOME),
    },
    4: {
        "tp2_sp_pp2_vpp2": Case(TP2 | SP | PP2 | VPP2, asked=SOME),
        "tp2_sp_cp2": Case(TP2 | SP | CP2, asked=SOME),
    },
}


def run(rank: int, world_size: int, rendezvous: str, directory: str) -> None:
    """Runs every case of this world size; rank 0 writes `<case>.pt`."""
    torch.set_num_threads(1)
    cpu_mode.enable()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}-{world_size}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),
    )
    for name, case in CASES[world_size].items():
        gathered: list[Any] = [None] * world_size
        dist.all_gather_object(gathered, run_case(case, Path(directory)))
        if rank == 0:
            torch.save(gathered, Path(directory, f"{name}.pt"))
    if world_size == 1:
        torch.save(edges(Path(directory)), Path(directory, "edges.pt"))
        torch.save(interrupted(Path(directory)), Path(directory, "interrupted.pt"))
        torch.save(replayed(Path(directory)), Path(directory, "replayed.pt"))
    dist.destroy_process_group()


SHAPES = (
    # Prompt tokens, then the part of each response token.
    (3, [0, 0, 0, 0, 1, 2, 3, 4, 4]),
    (1, [0, 0, 1, 2, 2, 2, 3]),
    (5, []),
    (2, [0] * 11 + [1, 1, 2, 3]),
    (4, [0, 0, 0, 0, 0, 0]),
    (7, [1, 2, 3]),
    (4, [0, 0, 1, 3, 4, 4, 4, 4, 4]),
    (6, [2]),
    (1, [0] * 14 + [1, 2, 2, 3, 4]),
    (9, [0, 0, 1, 2, 3]),
)
"""With a box at the end, in the middle, over the whole response, an empty one, and without."""


def make_batch(vocab_size: int) -> tuple[list[TrainSequence], list[Tensor]]:
    """Random sequences of every shape, and the parts of their responses."""
    generator = torch.Generator().manual_seed(7)
    sequences, parts = [], []
    for num_prompt, part in SHAPES:
        length, num_response = num_prompt + len(part), len(part)
        mask_T = torch.rand(num_response, generator=generator) < 0.8
        sequences.append(
            TrainSequence(
                token_ids_L=torch.randint(0, vocab_size, (length,), generator=generator),
                num_prompt=num_prompt,
                mask_T=mask_T,
                rollout_logprob_T=torch.full((num_response,), -5.0),
                # A value that must never be looked at where the mask is False.
                advantage_T=torch.randn(num_response, generator=generator).where(mask_T, torch.nan),
                old_logprob_T=None,
                reference_logprob_T=torch.full((num_response,), -5.0),
            )
        )
        parts.append(torch.tensor(part, dtype=torch.int64))
    return sequences, parts


def build(case: Case, directory: Path, *, replay: bool = False) -> Any:
    """A policy under the layout of the case, which this starts."""
    from megatron_credit.mcore.parallel import start_parallel
    from megatron_credit.mcore.policy import Policy

    parallel = ParallelConfig(**case.parallel)
    return Policy.build(
        policy=PolicyConfig(
            model=directory / case.model,
            tokens_per_microbatch=case.bound,
            dtype=case.dtype,
            recompute=case.recompute,
            router_replay=replay,
        ),
        optimizer=OptimizerConfig(kind="adam", lr=1e-3),
        parallel=parallel,
        ranks=start_parallel(parallel, seed=1, timeout_s=120),
        seed=1,
    )


def run_case(case: Case, directory: Path) -> dict[str, Any]:
    """Saliency for every question, and what the pass did to the training around it."""
    from megatron_credit.mcore.parallel import stop_parallel
    from megatron_credit.mcore.saliency import saliency

    policy = build(case, directory)
    sequences, parts = make_batch(policy.architecture.vocab_size)
    result: dict[str, Any] = {
        (leaf, align): saliency(
            policy, sequences, parts, temperature=TEMPERATURE, leaf=leaf, align=align
        )
        for leaf, align in case.asked
    }
    stop_parallel(keep_world=True)
    if case.trains:
        result["differences"], result["size"] = after_a_pass(case, directory)
    return result


def after_a_pass(case: Case, directory: Path) -> tuple[list[str], int]:
    """Names of what differs in two trainings, one of which has passes of saliency between its
    steps, and of what such a pass changed; and how many numbers were compared."""
    from megatron_credit.mcore.parallel import stop_parallel
    from megatron_credit.mcore.saliency import saliency

    ended, changed = [], []
    for with_passes in (False, True):
        policy = build(case, directory)
        sequences, parts = make_batch(policy.architecture.vocab_size)
        for _ in range(2):
            policy.update(sequences, objective=ObjectiveConfig(), temperature=TEMPERATURE)
            before = state(policy)
            if with_passes:
                # The caller may have turned gradients off.
                with torch.no_grad():
                    saliency(policy, sequences, parts, temperature=TEMPERATURE)
                changed += differences(before, state(policy))
        metrics = policy.update(sequences, objective=ObjectiveConfig(), temperature=TEMPERATURE)
        ended.append(state(policy) | {"metrics": str(metrics.metrics)})
        stop_parallel(keep_world=True)
    return changed + differences(*ended), len(ended[0])


def state(policy: Any) -> dict[str, Any]:
    """Everything of the policy that a pass could change, by name."""
    from megatron_credit.mcore.forward import get_forward_backward_func

    config = policy.chunks[0].config
    found: dict[str, Any] = {
        "finalize": config.finalize_model_grads_func is not None,
        "grad_sync": config.grad_sync_func is None,
        "no_sync": config.no_sync_func is None,
        "schedule": get_forward_backward_func().__name__,
        "steps": policy.optimizer.num_steps,
    }
    for number, (wrapped, chunk) in enumerate(zip(policy.wrapped, policy.chunks, strict=True)):
        for name, parameter in wrapped.named_parameters():
            key = f"{number} {name}"
            found[f"{key} weight"] = parameter.detach().clone()
            found[f"{key} grad"] = None if parameter.grad is None else parameter.grad.clone()
            found[f"{key} main_grad"] = parameter.main_grad.clone()
            found[f"{key} requires_grad"] = parameter.requires_grad
        for index, buffer in enumerate(wrapped.buffers + wrapped.expert_parallel_buffers):
            found[f"{number} buffer {index}"] = buffer.grad_data.clone()
        for name, module in chunk.named_modules():
            hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
            found[f"{number} {name} mode"] = module.training, *hooks
    for number, part in enumerate(policy.optimizer.parts()):
        for index, values in enumerate(part.optimizer.state.values()):
            for name, value in values.items():
                found[f"optimizer {number} {index} {name}"] = value.clone()
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of what is not the same, to the bit."""
    assert one.keys() == other.keys()
    return [key for key, value in one.items() if not same(value, other[key])]


def same(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return torch.equal(value, other)
    return not isinstance(value, Tensor) and value == other


def edges(directory: Path) -> dict[str, Any]:
    """Input at the edge of what is accepted, and what is said of input beyond it."""
    from megatron_credit.mcore.parallel import stop_parallel
    from megatron_credit.mcore.saliency import saliency

    policy = build(Case(), directory)
    sequences, parts = make_batch(policy.architecture.vocab_size)
    first, part = sequences[:1], parts[:1]
    foreign = replace(first[0], token_ids_L=torch.full_like(first[0].token_ids_L, 131))
    result: dict[str, Any] = {
        "empty": saliency(policy, [], [], temperature=1.0),
        "unboxed": saliency(
            policy, [sequences[2], sequences[4]], [parts[2], parts[4]], temperature=1
        ),
    }
    attempts: dict[str, tuple[list[TrainSequence], list[Tensor], dict[str, Any]]] = {
        "lists": (first, [], {}),
        "shape": (first, [part[0][1:]], {}),
        "dtype": (first, [part[0].int()], {}),
        "parts": (first, [part[0] + 1], {}),
        "temperature": (first, part, {"temperature": 0.0}),
        "leaf": (first, part, {"leaf": "second"}),
        "align": (first, part, {"align": "next"}),
        "foreign": ([foreign], part, {}),
    }
    for name, (given, told, options) in attempts.items():
        try:
            saliency(policy, given, told, **{"temperature": TEMPERATURE} | options)
        except ValueError as error:
            result[name] = str(error)
    stop_parallel(keep_world=True)
    return result


def interrupted(directory: Path) -> dict[str, Any]:
    """What an exception in the middle of the backward pass leaves behind."""
    from megatron_credit.mcore.parallel import stop_parallel
    from megatron_credit.mcore.saliency import saliency

    policy = build(Case(), directory)
    sequences, parts = make_batch(policy.architecture.vocab_size)
    policy.update(sequences, objective=ObjectiveConfig(), temperature=TEMPERATURE)
    expected = saliency(policy, sequences, parts, temperature=TEMPERATURE)

    def fail(_gradient: Tensor) -> None:
        raise RuntimeError("interrupted")

    def attach(_layer: Any, _args: Any, outputs: Any) -> None:
        outputs[0].register_hook(fail)

    handle = policy.chunks[0].decoder.layers[1].register_forward_hook(attach)
    before = state(policy)
    said = ""
    try:
        saliency(policy, sequences, parts, temperature=TEMPERATURE)
    except RuntimeError as error:
        said = str(error)
    changed = differences(before, state(policy))
    handle.remove()
    again = saliency(policy, sequences, parts, temperature=TEMPERATURE)
    stop_parallel(keep_world=True)
    return {
        "said": said,
        "changed": changed,
        "again": all(map(torch.equal, again, expected)),
    }


def replayed(directory: Path) -> dict[str, Any]:
    """Saliency of a model whose tokens go where they are told, and the sequences."""
    from megatron_credit.mcore.parallel import stop_parallel
    from megatron_credit.mcore.saliency import saliency

    policy = build(Case(model=EXPERTS), directory, replay=True)
    sequences, parts = make_batch(policy.architecture.vocab_size)
    sequences = replay_checks.with_experts(sequences, policy.architecture)
    found = saliency(policy, sequences, parts, temperature=TEMPERATURE)
    stop_parallel(keep_world=True)
    return {"found": found, "experts": [one.routed_experts_LDK for one in sequences]}
