"""What every rank of the tests of views runs: one world, one layout after another."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mcore import replay_checks
from torch import Tensor

from megatron_credit.batch.sequence import TrainSequence
from megatron_credit.batch.views import Views
from megatron_credit.mcore import cpu_mode
from megatron_credit.mcore.config import OptimizerConfig, ParallelConfig, PolicyConfig

TEMPERATURE = 0.8
FREE = 4
"""The context whose prompt is the plain one."""
FEC = ("fec", 1, (2, 3), FREE)
QUERIES: dict[str, dict[str, Any]] = {
    "fec": {"contrast": FEC},
    "reverse": {"contrast": ("pair", 1, 2, 0), "divergence": "reverse"},
    "top_k": {"contrast": ("fixed", 1, None, FREE), "top_k": 20},
    "none": {},
}
LOSSES: dict[str, tuple[bool, dict[str, Any]]] = {
    "own": (False, {"contrast": FEC}),
    "teacher": (True, {"contrast": FEC}),
    "reverse": (False, {"contrast": FEC, "divergence": "reverse", "top_k": 20}),
}
"""By kind: whether the teacher has other weights, and what is contrasted."""
DENSE, EXPERTS = "qwen3_odd_vocab", "qwen3_moe"
TEACHER = "teacher"
"""A model of the dense one's kind with other weights."""


@dataclass(frozen=True)
class Case:
    """One layout of one model; results of equal `model` must agree."""

    parallel: dict[str, Any] = field(default_factory=dict)
    model: str = DENSE
    bound: int = 96
    """Tokens of a micro-batch; less than the views of some rollouts take."""
    queries: tuple[str, ...] = ("fec",)
    losses: bool = False
    """Also what needs a model of other weights for the teachers."""


TP2, PP2, CP2 = {"tensor": 2}, {"pipeline": 2}, {"context": 2}
SP, VPP2, EP2 = {"sequence_parallel": True}, {"virtual_pipeline": 2}, {"expert": 2}
EVERY = tuple(QUERIES)
CASES: dict[int, dict[str, Case]] = {
    1: {
        "one": Case(queries=EVERY, losses=True),
        "moe": Case(model=EXPERTS),
        # The other extremes of packing: every rollout alone, and everything in one micro-batch.
        "alone": Case(bound=1),
        "together": Case(bound=10_000),
    },
    2: {
        "tp2": Case(TP2, queries=EVERY, losses=True),
        "tp2_sp": Case(TP2 | SP),
        "pp2": Case(PP2),
        "pp2_vpp2": Case(PP2 | VPP2, losses=True),
        "cp2": Case(CP2, queries=EVERY, losses=True),
        "cp2_alone": Case(CP2, bound=1),
        "dp2": Case(),
        "ep2_moe": Case(EP2, EXPERTS),
        "cp2_ep2_moe": Case(CP2 | EP2, EXPERTS),
    },
    4: {
        "tp2_pp2": Case(TP2 | PP2),
        "tp2_sp_cp2": Case(TP2 | SP | CP2, losses=True),
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
        result = run_case(case, Path(directory))
        dist.all_gather_object(gathered, result["scores"])
        if rank == 0:
            torch.save(result | {"all_scores": gathered}, Path(directory, f"{name}.pt"))
    if world_size == 1:
        torch.save(refusals(Path(directory)), Path(directory, "refusals.pt"))
        torch.save(replayed(Path(directory)), Path(directory, "replayed.pt"))
    dist.destroy_process_group()


def make_views(vocab_size: int) -> list[Views]:
    """Rollouts of many shapes that lack different views; one has no response, one only itself."""
    generator = torch.Generator().manual_seed(7)

    def ids(count: int) -> Tensor:
        return torch.randint(0, vocab_size, (count,), generator=generator)

    made = []
    for num_prompt, num_response, lengths in (
        (3, 9, (7, 9, 4)),
        (1, 4, (12, 1, 2)),
        (5, 0, (6, 8, 3)),
        (2, 17, (20, 11, None)),
        (7, 1, (5, None, None)),
        (4, 12, (None, 9, 30)),
        (9, 6, (None, None, None)),
        (6, 3, (3, 14, 11)),
    ):
        plain = sequence(ids(num_prompt + num_response), num_prompt)
        prompts = [None if length is None else ids(length) for length in lengths]
        # The evidence-free context, but where there is nothing else.
        alone = lengths == (None, None, None)
        free_L = None if alone else plain.token_ids_L[:num_prompt]
        made.append(Views.behind(plain, [*prompts, free_L]))
    return made + alike(ids)


def alike(ids: Callable[[int], Tensor]) -> list[Views]:
    """Rollouts of one prompt with the same evidence, which go the same way for a while; the first
    and the last are the same."""
    prompt_L, right_L, wrong_L, way_T = ids(5), ids(8), ids(6), ids(7)
    responses = (way_T, torch.cat([way_T[:4], ids(5)]), way_T[:2], way_T)
    return [
        Views.behind(
            sequence(torch.cat([prompt_L, response_T]), len(prompt_L)),
            [right_L, None if number == 1 else wrong_L, None, prompt_L],
        )
        for number, response_T in enumerate(responses)
    ]


def sequence(token_ids_L: Tensor, num_prompt: int) -> TrainSequence:
    """Tokens without a history."""
    zero_T = torch.zeros(len(token_ids_L) - num_prompt)
    return TrainSequence(
        token_ids_L=token_ids_L,
        num_prompt=num_prompt,
        mask_T=zero_T == 0,
        rollout_logprob_T=zero_T,
        advantage_T=zero_T,
        old_logprob_T=None,
        reference_logprob_T=None,
    )


def controllers(views: list[Views]) -> Tensor:
    """w of every response token of the rollouts, one after the other."""
    num_tokens = sum(one.plain.num_response for one in views)
    return torch.linspace(0, 0.9, num_tokens)


def start(case: Case) -> Any:
    """The ranks of the case's layout."""
    from megatron_credit.mcore.parallel import start_parallel

    return start_parallel(ParallelConfig(**case.parallel), seed=1, timeout_s=120)


def build(case: Case, directory: Path, ranks: Any, *, replay: bool = False) -> Any:
    """A policy whose optimizer step takes the gradient from its weights."""
    from megatron_credit.mcore.policy import Policy

    return Policy.build(
        policy=PolicyConfig(
            model=directory / case.model, tokens_per_microbatch=case.bound, router_replay=replay
        ),
        optimizer=OptimizerConfig(kind="sgd", lr=1.0, clip_grad=0),
        parallel=ParallelConfig(**case.parallel),
        ranks=ranks,
        seed=1,
    )


def run_case(case: Case, directory: Path) -> dict[str, Any]:
    """Statistics of every query, plain scores by both ways, and losses with their gradients."""
    from megatron_credit.mcore.parallel import stop_parallel

    ranks = start(case)
    policy = build(case, directory, ranks)
    views = make_views(policy.architecture.vocab_size)
    plain = [one.plain for one in views]
    bare = [Views(plain=one) for one in plain]
    result: dict[str, Any] = {
        "scores": {
            name: plainly(policy.score_views(views, temperature=TEMPERATURE, **QUERIES[name]))
            for name in case.queries
        },
        "plain": plainly(policy.score(plain, temperature=TEMPERATURE)),
        "bare": plainly(policy.score_views(bare, temperature=TEMPERATURE)),
    }
    if case.losses:
        teacher = build(replace(case, model=TEACHER), directory, ranks).chunks
        scores = policy.score_views(views, temperature=TEMPERATURE, contrast=FEC, teacher=teacher)
        result["scores"][TEACHER] = plainly(scores)
        result["losses"] = {}
        for name, (by_teacher, options) in LOSSES.items():
            # Each step moves the weights.
            policy = build(case, directory, ranks)
            found = losses(policy, views, options, teacher=teacher if by_teacher else None)
            result["losses"][name] = found
    stop_parallel(keep_world=True)
    return result


def plainly(scores: list[Any]) -> list[dict[str, Any]]:
    """The scores as dictionaries of tensors."""
    return [vars(one) for one in scores]


def losses(
    policy: Any, views: list[Views], options: dict[str, Any], *, teacher: Any
) -> dict[str, Any]:
    """Both losses of every response token, and the gradient of a mixture with the log-probs."""
    from megatron_credit.mcore.comparison import Comparison
    from megatron_credit.mcore.evidence_head import EvidenceHead
    from megatron_credit.mcore.forward import run_schedule
    from megatron_credit.mcore.scoring import TokenValues
    from megatron_credit.mcore.teacher_pass import read_teachers

    packer = policy.batching.view_packer(views, [1.0] * len(views))
    output, cp_group = policy.batching.head(TEMPERATURE), policy.ranks.cp_group
    comparison = Comparison(views[0].num_contexts, **options)
    head = EvidenceHead(output, comparison, cp_group, controller_T=controllers(views))
    batches = policy.batching.batches(packer)
    if teacher is not None:
        batches = read_teachers(teacher, policy.batching.batches_apart(packer), output, cp_group)
    values = TokenValues(2, packer.slots[-1], policy.device)

    def loss(
        batch: Any, logprob_R: Tensor, _: Tensor, reference_R: Tensor, evidence_R: Tensor
    ) -> tuple[Tensor, None]:
        values.keep(batch, torch.stack([reference_R, evidence_R]).detach())
        return mixture(logprob_R, reference_R, evidence_R), None

    before = {name: tensor.clone() for name, tensor in policy.weights()}
    policy.optimizer.zero_grad()
    run_schedule(policy.wrapped, batches, head, loss, forward_only=False)
    policy.optimizer.step()
    taken = {name: before[name] - tensor for name, tensor in policy.weights()}
    return {"values": values.gather(policy.ranks), "gradients": taken}


def mixture(logprob_T: Tensor, reference_T: Tensor, evidence_T: Tensor) -> Tensor:
    """A loss in which each part counts."""
    return 0.02 * (0.1 * logprob_T + reference_T + 20 * evidence_T).sum()


def refusals(directory: Path) -> dict[str, str]:
    """What is said of input that cannot be."""
    from megatron_credit.mcore.parallel import stop_parallel

    policy = build(Case(), directory, start(Case()))
    views = make_views(policy.architecture.vocab_size)
    plain = views[0].plain
    foreign = Views.behind(plain, [torch.tensor([131])])
    long = Views.behind(plain, [torch.zeros(56, dtype=torch.int64)])
    attempts = {
        "contrast": (views, {"contrast": ("fec", 1, 5, 0)}),
        "divergence": (views, {"contrast": FEC, "divergence": "sideways"}),
        "temperature": (views, {"temperature": 0.0}),
        "uneven": ([views[0], Views(plain=plain)], {}),
        "foreign": ([foreign], {}),
        "long": ([long], {}),
    }
    said = {}
    for name, (given, options) in attempts.items():
        try:
            policy.score_views(given, **{"temperature": TEMPERATURE} | options)
        except ValueError as error:
            said[name] = str(error)
    said["empty"] = str(policy.score_views([], temperature=TEMPERATURE))
    stop_parallel(keep_world=True)
    return said


def replayed(directory: Path) -> dict[str, Any]:
    """Scores of plain views whose experts are known, by both ways and beside other views."""
    from megatron_credit.mcore.parallel import stop_parallel

    case = Case(model=EXPERTS)
    policy = build(case, directory, start(case), replay=True)
    views = make_views(policy.architecture.vocab_size)
    plain = replay_checks.with_experts([one.plain for one in views], policy.architecture)
    views = [replace(one, plain=known) for one, known in zip(views, plain, strict=True)]
    bare = [Views(plain=one) for one in plain]
    result = {
        "plain": plainly(policy.score(plain, temperature=TEMPERATURE)),
        "bare": plainly(policy.score_views(bare, temperature=TEMPERATURE)),
        "views": plainly(policy.score_views(views, temperature=TEMPERATURE)),
    }
    stop_parallel(keep_world=True)
    return result
