"""What the tests of teaching teach: layouts, rollouts with their views, and steps over them."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_credit.batch.sequence import TrainSequence
from megatron_credit.batch.teaching import (
    DistillationTeaching,
    EvidenceTeaching,
    Teaching,
    TokenLoss,
)
from megatron_credit.batch.views import Views
from megatron_credit.mcore.config import OptimizerConfig, ParallelConfig, PolicyConfig
from megatron_credit.objective.config import ObjectiveConfig

TEMPERATURE = 0.8
OBJECTIVE = ObjectiveConfig(importance="none")
STUDENT, TEACHER = "qwen3_odd_vocab", "teacher"
VOCABULARY = 131
DECAY = 0.75
FREE, POSITIVE, NEGATIVES = 1, 2, (3, 4)
FEC = ("fec", POSITIVE, NEGATIVES, FREE)
COEFFICIENTS = {"reference": 0.5, "evidence": 30.0, "distillation": 2.0}
BETA = 0.3


@dataclass(frozen=True)
class Case:
    """One layout; all results must agree."""

    parallel: dict[str, Any] = field(default_factory=dict)
    bound: int = 96
    """Tokens of a micro-batch; less than the views of some rollouts take."""


TP2, PP2, CP2 = {"tensor": 2}, {"pipeline": 2}, {"context": 2}
SP, VPP2 = {"sequence_parallel": True}, {"virtual_pipeline": 2}
CASES: dict[int, dict[str, Case]] = {
    # The extremes of packing too: every rollout alone, and everything in one micro-batch.
    1: {"one": Case(), "alone": Case(bound=1), "together": Case(bound=10_000)},
    2: {
        "tp2": Case(TP2),
        "tp2_sp": Case(TP2 | SP),
        "pp2": Case(PP2),
        "pp2_vpp2": Case(PP2 | VPP2),
        "cp2": Case(CP2),
        "dp2": Case(),
    },
}
KINDS = ("evidence", "reverse", "distillation", "sparse")


def make_views() -> list[Views]:
    """Rollouts of many shapes that lack different views; one has no response."""
    generator = torch.Generator().manual_seed(3)

    def ids(count: int) -> Tensor:
        return torch.randint(0, VOCABULARY, (count,), generator=generator)

    made = []
    for num_prompt, num_response, lengths in (
        (3, 9, (7, 9, 4)),
        (5, 0, (6, 8, 3)),
        (2, 13, (20, 11, None)),
        (7, 1, (5, None, None)),
        (4, 8, (None, 9, 15)),
        (9, 6, None),
    ):
        plain = make_sequence(ids(num_prompt + num_response), num_prompt, generator)
        prompts = [None] * 4
        if lengths is not None:
            evidence = [None if length is None else ids(length) for length in lengths]
            # Another prompt than the plain one, or the policy would be its own reference.
            prompts = [ids(num_prompt + 1), *evidence]
        made.append(Views.behind(plain, prompts))
    return made


def make_sequence(ids_L: Tensor, num_prompt: int, generator: torch.Generator) -> TrainSequence:
    """Tokens with credit, some of them untrained, and some of those that are selected."""
    num_response = len(ids_L) - num_prompt
    return TrainSequence(
        token_ids_L=ids_L,
        num_prompt=num_prompt,
        mask_T=torch.rand(num_response, generator=generator) < 0.8,
        rollout_logprob_T=torch.full((num_response,), -5.0),
        advantage_T=torch.randn(num_response, generator=generator),
        old_logprob_T=None,
        reference_logprob_T=None,
        selected_T=torch.rand(num_response, generator=generator) < 0.3,
    )


def make_teaching(kind: str, views: list[Views]) -> Teaching:
    """Of each kind the losses of those tokens whose rollouts have the views that they need."""
    if kind == "distillation":
        losses = (token_loss("distillation", views, (FREE,)),)
        return DistillationTeaching(views=views, losses=losses, beta=BETA)
    if kind == "sparse":
        # Few tokens of one loss, none of the other.
        some = token_loss("reference", views, (FREE,))
        only = [mask_T & (number == 2) for number, mask_T in enumerate(some.mask)]
        nowhere = [torch.zeros_like(mask_T) for mask_T in some.mask]
        losses = (replace(some, mask=only), TokenLoss(name="evidence", coefficient=1, mask=nowhere))
    else:
        losses = (
            token_loss("reference", views, (FREE,)),
            token_loss("evidence", views, (FREE, POSITIVE)),
        )
    sizes = [one.plain.num_response for one in views]
    return EvidenceTeaching(
        views=views,
        losses=losses,
        controller=torch.linspace(0, 0.9, sum(sizes)).split(sizes),
        contrast=FEC,
        divergence="reverse" if kind == "reverse" else "forward",
    )


def token_loss(name: str, views: list[Views], contexts: tuple[int, ...]) -> TokenLoss:
    """Over the trained tokens of the rollouts that have these contexts, and a negative one."""
    mask = []
    for one in views:
        present = all(one.teachers[context - 1] is not None for context in contexts)
        if name == "evidence":
            present &= any(one.teachers[context - 1] is not None for context in NEGATIVES)
        mask.append(one.plain.mask_T & present)
    return TokenLoss(name=name, coefficient=COEFFICIENTS[name], mask=mask)


def build(case: Case, directory: Path, *, lr: float = 1.0, dtype: str = "fp32") -> Any:
    """A policy of plain SGD, whose step of rate 1 takes the gradient from its weights."""
    from megatron_credit.mcore.parallel import start_parallel
    from megatron_credit.mcore.policy import Policy

    parallel = ParallelConfig(**case.parallel)
    return Policy.build(
        policy=PolicyConfig(
            model=directory / STUDENT, tokens_per_microbatch=case.bound, dtype=dtype
        ),
        optimizer=OptimizerConfig(kind="sgd", lr=lr, clip_grad=0),
        parallel=parallel,
        ranks=start_parallel(parallel, seed=1, timeout_s=120),
        seed=1,
    )


def stop() -> None:
    """Ends the layout, not the world."""
    from megatron_credit.mcore.parallel import stop_parallel

    stop_parallel(keep_world=True)


def learn(policy: Any, views: list[Views], kind: str, **options: Any) -> Any:
    """One optimizer step; the policy's teacher reads."""
    return policy.update(
        [one.plain for one in views],
        objective=OBJECTIVE,
        temperature=TEMPERATURE,
        **{"teaching": make_teaching(kind, views), "teacher": policy.teacher} | options,
    )


def averages(policy: Any) -> dict[str, Tensor]:
    """The teacher's weights by Hugging Face name."""
    from megatron_credit.mcore.convert import Converter

    return exported(Converter(policy.architecture, policy.teacher, policy.ranks))


def exported(converter: Any) -> dict[str, Tensor]:
    """Its model's weights by name."""
    return {name: tensor.clone() for name, tensor in converter.export()}


def refusal(action: Callable[[], Any]) -> str:
    """What is said of something that cannot be."""
    try:
        action()
    except ValueError as error:
        return str(error)
    return "accepted"
