"""What every rank of the tests of answer probes runs: one world, one layout after another."""

import logging
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from mcore import replay_checks
from mcore.views_worker import sequence
from torch import Tensor

from megatron_credit.batch.probes import Continuation, ProbedRollout
from megatron_credit.mcore import cpu_mode
from megatron_credit.mcore.config import OptimizerConfig, ParallelConfig, PolicyConfig

TEMPERATURE = 0.8
DENSE, EXPERTS = "qwen3_odd_vocab", "qwen3_moe"


@dataclass(frozen=True)
class Case:
    """One layout of one model."""

    parallel: dict[str, Any] = field(default_factory=dict)
    model: str = DENSE
    bound: int = 96
    """Tokens of a micro-batch; less than some rollouts take with their probes."""


TP2, PP2, CP2 = {"tensor": 2}, {"pipeline": 2}, {"context": 2}
SP, VPP2, EP2 = {"sequence_parallel": True}, {"virtual_pipeline": 2}, {"expert": 2}
CASES: dict[int, dict[str, Case]] = {
    1: {
        "one": Case(),
        "moe": Case(model=EXPERTS),
        # The other extremes of packing: every rollout alone, and everything in one micro-batch.
        "alone": Case(bound=1),
        "together": Case(bound=10_000),
    },
    2: {
        "tp2": Case(TP2),
        "tp2_sp": Case(TP2 | SP),
        "pp2": Case(PP2),
        "pp2_vpp2": Case(PP2 | VPP2),
        "cp2": Case(CP2),
        "cp2_alone": Case(CP2, bound=1),
        "dp2": Case(),
        "ep2_moe": Case(EP2, EXPERTS),
        "cp2_ep2_moe": Case(CP2 | EP2, EXPERTS),
    },
    4: {
        "tp2_pp2": Case(TP2 | PP2),
        "tp2_sp_cp2": Case(TP2 | SP | CP2),
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
        torch.save(refusals(Path(directory)), Path(directory, "refusals.pt"))
        torch.save(replayed(Path(directory)), Path(directory, "replayed.pt"))
        torch.save(unshared(Path(directory)), Path(directory, "unshared.pt"))
    dist.destroy_process_group()


def answers(opening: tuple[int, ...], *each: tuple[int, ...]) -> tuple[Continuation, ...]:
    """Continuations with the same opening."""
    return tuple(Continuation(opening_ids=opening, answer_ids=one) for one in each)


ONE_DIGIT = answers((), (40,), (41,), (40,))
DIGITS = answers((7, 8), (50, 51, 9), (50, 52, 9), (53, 9), (50, 51, 9), (50, 9), (54, 55, 56, 9))
"""The fourth is the first again."""
PREFIXES = (
    *answers((), (60,), (60, 61), (60, 61, 62)),
    # The same tokens, of which others are scored.
    *answers((60,), (61,), (61, 62)),
    *answers((60, 61), (62,)),
)
MANY = tuple(
    Continuation(opening_ids=(7, 8, opening), answer_ids=(first, second))
    for opening in (1, 2)
    for first in (70, 71, 72)
    for second in (80, 81)
)


def make_rollouts(vocab_size: int) -> list[ProbedRollout]:
    """Of many shapes: without response, states or answers; with more branches than a micro-batch
    holds; with answers that begin alike or go on as the response does."""
    generator = torch.Generator().manual_seed(7)
    made = []
    for num_prompt, num_response, states, continuations in (
        (3, 9, (0, 4, 9), DIGITS),
        (1, 4, (0, 3), ONE_DIGIT),
        (5, 0, (0,), DIGITS),
        (2, 17, (3, 5, 11, 17), MANY),
        (7, 1, (1,), answers((), (3, 4, 5))),
        (4, 12, (), DIGITS),
        (9, 6, (2, 5), ()),
        (6, 3, (0, 1, 2, 3), PREFIXES),
        (3, 14, (2, 9), None),
        (8, 2, (0,), answers((5, 6), (9,))),
    ):
        ids_L = torch.randint(0, vocab_size, (num_prompt + num_response,), generator=generator)
        if continuations is None:
            onward = tuple(ids_L[num_prompt + 2 : num_prompt + 6].tolist())
            continuations = answers(onward[:1], onward[1:], (*onward[1:3], 9))
        made.append(
            ProbedRollout(
                sequence=sequence(ids_L, num_prompt), states=states, continuations=continuations
            )
        )
    first = made[0]
    # The same again, and another response that begins like it.
    other_L = torch.cat([first.sequence.token_ids_L[:7], torch.tensor([90, 91])])
    other = replace(first, sequence=sequence(other_L, 3), states=(0, 1, 4, 6))
    return [*made, first, other]


def build(case: Case, directory: Path, *, replay: bool = False) -> Any:
    """A policy under the case's layout."""
    from megatron_credit.mcore.parallel import start_parallel
    from megatron_credit.mcore.policy import Policy

    parallel = ParallelConfig(**case.parallel)
    return Policy.build(
        policy=PolicyConfig(
            model=directory / case.model, tokens_per_microbatch=case.bound, router_replay=replay
        ),
        optimizer=OptimizerConfig(),
        parallel=parallel,
        ranks=start_parallel(parallel, seed=1, timeout_s=120),
        seed=1,
    )


def run_case(case: Case, directory: Path) -> dict[str, list[Tensor]]:
    """What is found by either way, and by score before and after."""
    from megatron_credit.mcore.parallel import stop_parallel
    from megatron_credit.mcore.probes import plain_probes, probe_answers

    policy = build(case, directory)
    rollouts = make_rollouts(policy.architecture.vocab_size)
    asked = [one for one in rollouts if not one.is_empty]
    sequences = [one.sequence for one in rollouts]
    before = policy.score(sequences, temperature=TEMPERATURE)
    found = {
        "shared": probe_answers(policy, rollouts, temperature=TEMPERATURE),
        "plain": plain_probes(policy, asked, temperature=TEMPERATURE),
        "before": [one.logprob_T for one in before],
        "after": [one.logprob_T for one in policy.score(sequences, temperature=TEMPERATURE)],
    }
    stop_parallel(keep_world=True)
    return found


def refusals(directory: Path) -> dict[str, str]:
    """What is said of input that cannot be, and of none."""
    from megatron_credit.mcore.parallel import stop_parallel
    from megatron_credit.mcore.probes import probe_answers

    policy = build(Case(), directory)
    first, second, *_ = make_rollouts(policy.architecture.vocab_size)
    foreign = sequence(torch.tensor([1, 131]), 1)
    attempts = {
        "temperature": ([first], 0.0),
        "foreign": ([second, replace(second, sequence=foreign, states=(0,))], 1.0),
        "foreign_answer": ([replace(first, continuations=answers((), (4,), (5, 131)))], 1.0),
        "long": ([second, replace(first, continuations=answers((1,) * 50, (2,) * 3))], 1.0),
        "fits": ([replace(first, continuations=answers((1,) * 50, (2,) * 2))], 1.0),
    }
    said = {}
    for name, (given, temperature) in attempts.items():
        try:
            (found_PY,) = probe_answers(policy, given, temperature=temperature)
            said[name] = str(tuple(found_PY.shape))
        except ValueError as error:
            said[name] = str(error)
    said["empty"] = str(probe_answers(policy, [], temperature=1.0))
    stop_parallel(keep_world=True)
    return said


def replayed(directory: Path) -> list[Tensor]:
    """Probes of a policy that replays what is known of each token's experts."""
    from megatron_credit.mcore.parallel import stop_parallel
    from megatron_credit.mcore.probes import plain_probes, probe_answers

    policy = build(Case(model=EXPERTS), directory, replay=True)
    rollouts = make_rollouts(policy.architecture.vocab_size)
    known = replay_checks.with_experts([one.sequence for one in rollouts], policy.architecture)
    rollouts = [replace(one, sequence=routed) for one, routed in zip(rollouts, known, strict=True)]
    asked = [one for one in rollouts if not one.is_empty]
    found = probe_answers(policy, rollouts, temperature=TEMPERATURE)
    plain = plain_probes(policy, asked, temperature=TEMPERATURE)
    stop_parallel(keep_world=True)
    return [*found, *plain]


def unshared(directory: Path) -> dict[str, Any]:
    """What is found, and said in the log, where attention is Transformer Engine's: once for two
    calls."""
    from megatron_credit.mcore import probes
    from megatron_credit.mcore.parallel import stop_parallel

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(f"{record.levelname} {record.getMessage()}")
    probes.log.addHandler(handler)
    probes.log.setLevel(logging.INFO)
    policy = build(Case(), directory)
    rollouts = make_rollouts(policy.architecture.vocab_size)
    transformer_engine = mock.patch.object(probes, "uses_transformer_engine", return_value=True)
    with transformer_engine, mock.patch.object(probes, "shared_probes", side_effect=AssertionError):
        probes.probe_answers(policy, rollouts, temperature=TEMPERATURE)
        found = probes.probe_answers(policy, rollouts, temperature=TEMPERATURE)
    stop_parallel(keep_world=True)
    return {"found": found, "messages": messages}
