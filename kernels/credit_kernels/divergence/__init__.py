"""The divergence between a student and a teacher of the same tokens; the logits are never held."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from credit_kernels.checks import check_head, check_scale
from credit_kernels.dispatch import choose
from credit_kernels.divergence.function import DivergenceLoss, Settings
from credit_kernels.vocab_parallel import VocabShard

BACKENDS: dict[str, Callable[..., Tensor]] = {"torch": DivergenceLoss.apply}
"""Implementations by backend name, which `dispatch` chooses."""


def divergence_loss(  # noqa: PLR0913
    hidden_TH: Tensor,
    teacher_hidden_TH: Tensor,
    weight_VH: Tensor,
    target_T: Tensor,
    *,
    beta: float = 0.5,
    top_k: int | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    shard: VocabShard | None = None,
    teacher_weight_VH: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """divergence_T in nats: beta KL(teacher || m) + (1 - beta) KL(student || m).

    m is beta teacher + (1 - beta) student (2306.13649); beta 0 and 1, where that formula is 0,
    stand for KL(teacher || student) and KL(student || teacher). With `top_k` only the student's
    most likely top_k tokens of the whole vocabulary are told apart, the lower ids among equals, and
    all others count as one event; a top_k of the vocabulary's size or more changes nothing.

    `teacher_weight_VH` is the teacher's output weight; None: the student's. Logits, shards, padding
    and ignored rows are as in `linear_logprob`; the targets say nothing but which rows are ignored.

    Differentiable once, in hidden_TH and in weight_VH through it; teacher and support are
    constants. With a shard's group the gradient of hidden is this rank's part, to be summed over
    the group by the caller. Forward, for a beta of 0 or 1: one MAX and one SUM all-reduce; between
    them: also an all-gather of two numbers a token, since m needs both normalisers; with `top_k`
    instead of all that: an all-gather of 3 top_k + 2 float64 numbers a token, cut where those
    exceed 8 MiB. None backward. Between the passes 5 numbers a token are held, with `top_k`
    2 top_k + 3.

    `backend` is "torch" or, for the same, "auto".

    Raises ValueError for shapes, types, devices or numbers that do not fit together, and for
    another backend.
    """
    shard = VocabShard.whole(weight_VH.shape[0]) if shard is None else shard
    check_head(hidden_TH, weight_VH, target_T, shard, "TH")
    check_scale(temperature, softcap)
    _check_like("teacher_hidden", teacher_hidden_TH, "hidden", hidden_TH)
    if teacher_weight_VH is not None:
        _check_like("teacher_weight", teacher_weight_VH, "weight", weight_VH)
    if not 0 <= beta <= 1:
        raise ValueError(f"beta={beta}; expected 0 (forward KL) to 1 (reverse KL)")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k}; expected at least 1, or None for the whole vocabulary")
    settings = Settings(
        beta=beta,
        top_k=None if top_k is None or top_k >= shard.total else top_k,
        temperature=temperature,
        softcap=softcap,
        shard=shard,
    )
    implementation = choose(backend, BACKENDS, operation="divergence_loss")
    return implementation(
        hidden_TH, weight_VH, teacher_hidden_TH, teacher_weight_VH, target_T, settings
    )


def _check_like(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    described, expected = _described(tensor), _described(other)
    if described != expected:
        raise ValueError(f"{name} is {described}, {other_name} {expected}; expected the same")


def _described(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.device
