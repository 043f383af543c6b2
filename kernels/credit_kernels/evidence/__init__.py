"""Statistics and losses of several contexts of the same tokens; the logits are never held."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from credit_kernels.checks import check_head, check_scale
from credit_kernels.dispatch import Work, choose
from credit_kernels.evidence import units
from credit_kernels.evidence.chunked import EvidenceLoss, evidence_stats_chunked
from credit_kernels.evidence.contrast import DIVERGENCES, Contrast, ContrastArgument, Options
from credit_kernels.evidence.function import Backend, FusedEvidenceLoss, evidence_stats_fused
from credit_kernels.evidence.moments import EvidenceStats
from credit_kernels.evidence.operands import chosen_for_loss
from credit_kernels.evidence.tables import refusal_of_tiles
from credit_kernels.vocab_parallel import VocabShard


def _rows() -> Backend:
    from credit_kernels.evidence.rows import BACKEND

    return BACKEND


def _tiles() -> Backend:
    from credit_kernels.evidence.tiles import BACKEND

    return BACKEND


STATS_BACKENDS: dict[str, Callable[..., Any]] = {
    "torch": evidence_stats_chunked,
    "rows": lambda *inputs: evidence_stats_fused(*inputs, _rows()),
    "tiles": lambda *inputs: evidence_stats_fused(*inputs, _tiles()),
}
LOSS_BACKENDS: dict[str, Callable[..., Any]] = {
    "torch": EvidenceLoss.apply,
    "rows": lambda *inputs: FusedEvidenceLoss.apply(*inputs, _rows()),
    "tiles": lambda *inputs: FusedEvidenceLoss.apply(*inputs, _tiles()),
}
"""Implementations by backend name, which `dispatch` chooses; the last two need Triton."""


def evidence_stats(  # noqa: PLR0913
    hidden_CTH: Tensor,
    weight_VH: Tensor,
    target_T: Tensor,
    *,
    contrast: ContrastArgument | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    shard: VocabShard | None = None,
    backend: str = "auto",
    teacher_weight_VH: Tensor | None = None,
    divergence: str = "forward",
    top_k: int | None = None,
) -> EvidenceStats:
    """Log-probs, entropies and KLs of every context and, with `contrast`, its moments; no gradient.

    Context 0 is the student, the others are teachers, whose output weight is `teacher_weight_VH` or
    the same. Logits, shards, padding and ignored rows are as in `linear_logprob`.

    `contrast` is (kind, positive, negative, free): numbers of contexts that stand for q+, q-, q0. A
    tuple of negatives means the mean of their probabilities, and `fixed` has None there. d is
    task - alpha nuisance; task is q+ - q- (fixed: q+ - q0), nuisance (q+ + q-) / 2 - q0, and alpha
    Cov_p(task, nuisance) / (Var_p(nuisance) + 1e-8) for `fec`, else 0. With divergence `reverse`
    log-probs take the place of probabilities, and tangents p (r - E_p[r]) that of d.

    `top_k` restricts the sums of the contrast, not entropies and KLs, to the columns that are among
    the k most likely of one of its contexts, and the sampled token; probabilities stay as they are.

    With a shard's group: one MAX and one SUM all-reduce. `top_k` adds an all-gather, and a mean of
    several negatives another MAX and SUM.

    `backend` as in `linear_logprob`; `tiles` takes up to 4 contexts of one weight with one negative
    and without `top_k`.

    Raises ValueError for shapes, types, devices or numbers that do not fit together, and for a
    backend that is not available or cannot run.
    """
    shard = VocabShard.whole(weight_VH.shape[0]) if shard is None else shard
    _check(hidden_CTH, weight_VH, target_T, teacher_weight_VH, shard)
    check_scale(temperature, softcap)
    options = _options(contrast, len(hidden_CTH), divergence, top_k, temperature, softcap, shard)
    work = Work(hidden_CTH.device, hidden_CTH.dtype, len(target_T), shard.num_columns)
    refused = refusal_of_tiles(options, len(hidden_CTH), teacher_weight_VH is not None)
    built = _eligible(STATS_BACKENDS, backend, refused)
    implementation = choose(backend, built, operation="evidence_stats", work=work)
    with torch.no_grad():
        return implementation(hidden_CTH, weight_VH, teacher_weight_VH, target_T, options)


def evidence_loss(  # noqa: PLR0913
    hidden_CTH: Tensor,
    weight_VH: Tensor,
    target_T: Tensor,
    controller_T: Tensor,
    *,
    contrast: ContrastArgument,
    temperature: float = 1.0,
    softcap: float | None = None,
    shard: VocabShard | None = None,
    backend: str = "auto",
    teacher_weight_VH: Tensor | None = None,
    divergence: str = "forward",
    top_k: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(reference_T, evidence_T), without factors of their own; see `evidence_stats` for the inputs.

    forward: KL(q0 || p) and -w sum_v d log p; reverse: KL(p || q0) and log sum_v q_b e^(w r) -
    w E_p[r] with r = r_task - alpha r_nuisance and q_b = q- (fixed: q0). w is `controller_T`. With
    `top_k` all sums are over the support.

    Differentiable once, in context 0 of hidden and in weight_VH through it; the controller, alpha
    and the teachers are constants. With a shard's group the gradient of hidden is this rank's part,
    to be summed over the group by the caller; all-reduces as in `evidence_stats`, and for `reverse`
    another pass with a MAX and a SUM; none backward.

    The backward pass makes the logits once more. Not so where only hidden has a gradient
    (weight_VH.requires_grad is False), without a group, in "torch" and "rows": the gradients of
    both losses in the R rows that are not ignored are then made beside the statistics and kept,
    8 R H bytes (float32; 16 for float64 inputs), or half of that where context 0 stands for q0 and
    all columns count, since the reference then has none.

    Raises ValueError as `evidence_stats` does.
    """
    shard = VocabShard.whole(weight_VH.shape[0]) if shard is None else shard
    _check(hidden_CTH, weight_VH, target_T, teacher_weight_VH, shard)
    check_scale(temperature, softcap)
    options = _options(contrast, len(hidden_CTH), divergence, top_k, temperature, softcap, shard)
    options = replace(options, keeps_units=units.pay(hidden_CTH, weight_VH, options))
    if options.contrast is None:
        raise ValueError("contrast=None; expected (kind, positive, negative, free)")
    if controller_T.shape != target_T.shape or not controller_T.is_floating_point():
        raise ValueError(
            f"controller has shape {tuple(controller_T.shape)} and type {controller_T.dtype}; "
            f"expected {tuple(target_T.shape)} and a floating type"
        )
    if controller_T.device != target_T.device:
        raise ValueError(
            f"controller is on {controller_T.device}, target on {target_T.device}; expected one "
            "device"
        )
    work = Work(hidden_CTH.device, hidden_CTH.dtype, len(target_T), shard.num_columns)
    num_contexts = len(chosen_for_loss(options.contrast))
    refused = refusal_of_tiles(options, num_contexts, teacher_weight_VH is not None)
    built = _eligible(LOSS_BACKENDS, backend, refused)
    implementation = choose(backend, built, operation="evidence_loss", work=work)
    return implementation(
        hidden_CTH, weight_VH, teacher_weight_VH, target_T, controller_T.detach(), options
    )


def _eligible(
    backends: dict[str, Callable[..., Any]], backend: str, refused: str | None
) -> dict[str, Callable[..., Any]]:
    """What `auto` may choose from; whoever names `tiles` is told why it is refused."""
    if backend != "auto" or refused is None:
        return backends
    return {name: built for name, built in backends.items() if name != "tiles"}


def _options(
    contrast: ContrastArgument | None,
    num_contexts: int,
    divergence: str,
    top_k: int | None,
    temperature: float,
    softcap: float | None,
    shard: VocabShard,
) -> Options:
    if divergence not in DIVERGENCES:
        raise ValueError(f"divergence={divergence!r}; expected one of {list(DIVERGENCES)}")
    if top_k is not None and (top_k < 1 or contrast is None):
        raise ValueError(
            f"top_k={top_k} with contrast={contrast}; expected at least 1 and a contrast, or None "
            "for all columns"
        )
    return Options(
        contrast=None if contrast is None else Contrast.parse(contrast, num_contexts),
        divergence=divergence,
        top_k=top_k,
        temperature=temperature,
        softcap=softcap,
        shard=shard,
    )


def _check(
    hidden_CTH: Tensor,
    weight_VH: Tensor,
    target_T: Tensor,
    teacher_weight_VH: Tensor | None,
    shard: VocabShard,
) -> None:
    check_head(hidden_CTH, weight_VH, target_T, shard, "CTH")
    if len(hidden_CTH) == 0:
        raise ValueError(f"hidden {tuple(hidden_CTH.shape)} has no context; expected the student")
    if teacher_weight_VH is None:
        return
    described, expected = (
        (tuple(weight.shape), weight.dtype, weight.device)
        for weight in (teacher_weight_VH, weight_VH)
    )
    if described != expected:
        raise ValueError(f"the teachers' weight is {described}, the student's {expected}")
