"""The `rows` backend: the products of a chunk of rows in all contexts, and a kernel over each row.

The products are the vendor's; those of all contexts of a chunk live in memory in float32 between
the two, and in the backward pass the student's become their own gradient there.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from credit_kernels.dispatch import chunk_bytes
from credit_kernels.evidence import row_kernels, units
from credit_kernels.evidence.contrast import Options
from credit_kernels.evidence.function import Backend, coefficients
from credit_kernels.evidence.moments import Moments, concatenate
from credit_kernels.evidence.operands import Contexts
from credit_kernels.evidence.plan import Plan, moments_of
from credit_kernels.evidence.tables import ROW_SIZES
from credit_kernels.logprob import rows as logprob_rows
from credit_kernels.logprob.kernels import row_stats
from credit_kernels.logprob.operands import blocks
from credit_kernels.logprob.tables import ROW_SIZES as SOFTMAX_SIZES
from credit_kernels.products import add_product, product, write_product
from credit_kernels.targets import target_of
from credit_kernels.vocab_parallel import LOWEST, LocalStats, gather, reduce


def prepared(contexts: Contexts) -> Contexts:
    """With the thresholds of top_k and the normalisers of several negatives."""
    contrast, options = contexts.options.contrast, contexts.options
    if contrast is not None and options.top_k is not None:
        contexts = contexts.with_numbers(thresholds(contexts, contrast.named, options.top_k))
    if contrast is not None and contrast.is_mixed:
        local = [
            logprob_rows.local_stats(contexts.head(context), contexts.target_R, False)
            for context in contrast.negatives
        ]
        stacked = LocalStats(*map(torch.stack, zip(*(part.tensors for part in local), strict=True)))
        softmax = reduce(stacked, options.shard.group)
        contexts = contexts.with_numbers(softmax.max_T, softmax.sum_T.log())
    return contexts


def thresholds(contexts: Contexts, named: tuple[int, ...], top_k: int) -> Tensor:
    """[J, R]: products that the support reaches down to in each of the named contexts.

    Between the K-th and the next, as in `support.with_support`, and with the same all-gather.
    """
    count = top_k + 1
    num_columns = contexts.options.shard.num_columns
    top_JRK = contexts.number_NR.new_full((len(named), len(contexts.target_R), count), LOWEST)
    here = min(count, num_columns)
    for rows, product_CKV in products(contexts) if here else ():
        top_JRK[:, rows, :here] = product_CKV[list(named)].topk(here, -1).values
    top_JRK = torch.cat(gather(top_JRK, contexts.options.shard.group), -1).topk(count, -1).values
    return (top_JRK[..., -2] + top_JRK[..., -1]) / 2


def local_moments(contexts: Contexts, plan: Plan) -> Moments:
    """Statistics over this rank's columns; each chunk of products serves both of its kernels."""
    pieces = [moments for *_, moments in chunk_moments(contexts, plan)]
    return concatenate(pieces) if pieces else contexts.no_moments(plan)


def moments_and_units(contexts: Contexts, plan: Plan) -> tuple[Moments, Tensor]:
    """The same and the [U, R, H] `units`, from the same chunks of products."""
    student, options = contexts.head(0), contexts.options
    unit_URH = contexts.number_NR.new_zeros(units.count(options), *student.hidden_RH.shape)
    pieces = []
    for rows, part, product_CKV, moments in chunk_moments(contexts, plan):
        numbers = unit_numbers(moments, plan, options)
        for unit_KH, number_QK in zip(unit_URH[:, rows], numbers, strict=True):
            ready = part.with_numbers(number_QK)
            grad_KV = product_gradient(ready, plan, product_CKV, beside=True)
            write_product(unit_KH, grad_KV, student.weight_CH.T)
        pieces.append(moments)
    return concatenate(pieces) if pieces else contexts.no_moments(plan), unit_URH


def chunk_moments(
    contexts: Contexts, plan: Plan
) -> Iterator[tuple[slice, Contexts, Tensor, Moments]]:
    """Chunks of rows, with their softmaxes among the numbers, their products and statistics."""
    contrast = contexts.options.contrast
    for rows, product_CKV in products(contexts):
        part, softmax = contexts[rows].with_softmaxes(softmaxes(contexts[rows], product_CKV))
        moments = moments_of(softmax, sums(part, plan, product_CKV), plan, contrast)
        yield rows, part, product_CKV, moments


def unit_numbers(moments: Moments, plan: Plan, options: Options) -> list[Tensor]:
    """[slots + 2, K] for each unit: the numbers that the gradient program reads last."""
    found, contrast = moments.contrast, options.contrast
    assert found is not None and contrast is not None
    alpha_R = found.alpha_T()
    offset_2R = found.offsets_2T(alpha_R).float()
    return [
        coefficients(contrast, plan, alpha_R.float(), offset_2R, incoming_2R) / options.temperature
        for incoming_2R in units.incoming(options, offset_2R[0])
    ]


def softmaxes(contexts: Contexts, product_CKV: Tensor) -> LocalStats:
    """[C, K]: of the contexts."""
    stats, column_K = contexts.no_softmaxes(), contexts.column_R
    head, size = contexts.head(0), SOFTMAX_SIZES[target_of(column_K.device)]
    for context, product_KV in enumerate(product_CKV):
        row_stats[(blocks(len(product_KV), size.rows),)](
            product_KV,
            column_K,
            *(out_CK[context] for out_CK in stats.tensors[:4]),
            *product_KV.shape,
            product_KV.stride(0),
            head.scale,
            head.cap,
            ROWS=size.rows,
            COLUMNS=size.columns,
            CAPPED=head.softcap is not None,
            num_warps=size.warps,
        )
    return stats


def sums(contexts: Contexts, plan: Plan, product_CKV: Tensor) -> Tensor:
    """[sums, K]: what the plan asks for."""
    sums_NK = contexts.number_NR.new_empty(plan.count, len(contexts.target_R))
    if plan.count:
        launch(row_kernels.row_sums, contexts, plan, product_CKV, contexts.number_NR, sums_NK)
    return sums_NK


def tilted(contexts: Contexts, plan: Plan) -> LocalStats:
    """Softmax over the support of a sum of coefficient times log-prob."""
    stats = contexts.no_softmaxes()[0]
    for rows, product_CKV in products(contexts):
        sums_2K = contexts.number_NR.new_empty(2, product_CKV.shape[1])
        part = contexts[rows]
        launch(row_kernels.row_tilted, part, plan, product_CKV, part.number_NR, sums_2K)
        stats.max_T[rows], stats.sum_T[rows] = sums_2K
    return stats


def launch(
    program: Any, contexts: Contexts, plan: Plan, product_CKV: Tensor, *arrays: Tensor
) -> None:
    """One of the programs that go over whole rows; the arrays are [.., K]."""
    head, size = contexts.head(0), ROW_SIZES[target_of(product_CKV.device)]
    program[(blocks(product_CKV.shape[1], size.rows),)](
        product_CKV,
        contexts.column_R,
        *arrays,
        *product_CKV.shape[1:],
        *product_CKV.stride()[:2],
        product_CKV.shape[1],
        head.scale,
        head.cap,
        PLAN=plan,
        ROWS=size.rows,
        COLUMNS=size.columns,
        CAPPED=head.softcap is not None,
        num_warps=size.warps,
    )


def gradients(
    contexts: Contexts, plan: Plan, wants_hidden: bool, wants_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the student's rows and of the weight, added up in float32."""
    student = contexts.head(0)
    grad_RH = torch.zeros_like(student.hidden_RH) if wants_hidden else None
    grad_VH = torch.zeros_like(student.weight_VH, dtype=torch.float32) if wants_weight else None
    for rows, product_CKV in products(contexts):
        grad_KV = product_gradient(contexts[rows], plan, product_CKV)
        if grad_RH is not None:
            grad_RH[rows] = product(grad_KV, student.weight_CH.T)
        if grad_VH is not None:
            add_product(grad_VH[: student.num_columns], grad_KV.T, student.hidden_RH[rows].T)
    return grad_RH, None if grad_VH is None else grad_VH.to(student.weight_VH.dtype)


def product_gradient(
    contexts: Contexts, plan: Plan, product_CKV: Tensor, *, beside: bool = False
) -> Tensor:
    """Gradient of the student's products: in their place, or beside in the tensor cores' type."""
    head, size = contexts.head(0), ROW_SIZES[target_of(product_CKV.device)]
    grad_KV = product_CKV[0]
    if beside or head.gradient_dtype != grad_KV.dtype:
        buffer_KV = grad_KV.new_empty(len(grad_KV), grad_KV.stride(0), dtype=head.gradient_dtype)
        grad_KV = buffer_KV[:, : grad_KV.shape[1]]
    grid = (blocks(grad_KV.shape[0], size.rows), blocks(grad_KV.shape[1], size.columns))
    row_kernels.row_gradient[grid](
        product_CKV,
        grad_KV,
        contexts.column_R,
        contexts.number_NR,
        len(grad_KV),
        *product_CKV.stride()[:2],
        len(grad_KV),
        head.scale,
        head.cap,
        PLAN=plan,
        ROWS=size.rows,
        COLUMNS=size.columns,
        CAPPED=head.softcap is not None,
        num_warps=size.warps,
    )
    return grad_KV


def products(contexts: Contexts) -> Iterator[tuple[slice, Tensor]]:
    """Chunks of rows with the float32 products of all contexts, each in the memory of the last."""
    heads = [contexts.head(context) for context in range(len(contexts.hidden_CRH))]
    num_rows, num_columns = len(contexts.target_R), heads[0].num_columns
    if heads[0].is_empty:
        return
    columns = ROW_SIZES[target_of(contexts.target_R.device)].columns
    stride = blocks(num_columns, columns) * columns
    row_bytes = stride * (4 * len(heads) + heads[0].gradient_dtype.itemsize)
    chunk = max(chunk_bytes(contexts.target_R.device) // row_bytes // 128 * 128, 128)
    buffer_CKV = contexts.number_NR.new_empty(len(heads), min(chunk, num_rows), stride)
    for first in range(0, num_rows, chunk):
        rows = slice(first, min(first + chunk, num_rows))
        product_CKV = buffer_CKV[:, : rows.stop - first, :num_columns]
        for head, product_KV in zip(heads, product_CKV, strict=True):
            write_product(product_KV, head.hidden_RH[rows], head.weight_CH)
        yield rows, product_CKV


BACKEND = Backend(prepared, local_moments, tilted, gradients, moments_and_units)
