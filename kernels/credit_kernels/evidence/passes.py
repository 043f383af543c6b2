"""Passes over the logits of all views that end in local statistics of each token."""

from collections.abc import Iterator

import torch
from torch import Tensor

from credit_kernels.evidence import units
from credit_kernels.evidence.block import Block
from credit_kernels.evidence.forward import ForwardSums
from credit_kernels.evidence.moments import Moments, concatenate, log_mass, with_mean
from credit_kernels.evidence.reverse import ReverseSums, tilted
from credit_kernels.evidence.support import kept
from credit_kernels.evidence.views import Views
from credit_kernels.matmul import matmul_nt
from credit_kernels.vocab_parallel import LOWEST, LocalStats, reduce
from credit_kernels.vocab_parallel import concatenate as concatenate_softmax

Part = tuple[slice, Tensor, LocalStats]
"""A range of rows, their logits in all views, [C, R, V], and the softmaxes of those."""
SUMS = {"forward": ForwardSums, "reverse": ReverseSums}


def local_moments(views: Views, *, with_kl: bool, with_loss: bool) -> Moments:
    """The statistics over this rank's columns: the contrast's, and KLs and losses if asked for."""
    share_CR = _log_shares(views)
    pieces = []
    for held in views.logits():
        parts = [
            _part_moments(views, part, share_CR, with_kl=with_kl, with_loss=with_loss)[1]
            for part in _parts_of(views, held)
        ]
        # At once: small tensors between the large ones keep malloc from joining what is freed.
        pieces.append(concatenate(parts))
    return concatenate(pieces)


def moments_and_units(views: Views) -> tuple[Moments, Tensor]:
    """The same for the loss, and [U, R, H] `units` of a head whose columns are all here."""
    student, share_CR = views.heads[0], _log_shares(views)
    unit_URH = student.scaled_RH.new_zeros(units.count(views.options), *student.scaled_RH.shape)
    pieces = []
    for held in views.logits():
        parts = [_moments_to_gradients(views, part, share_CR) for part in _parts_of(views, held)]
        pieces.append(concatenate(parts))
        rows, grad_URV, _ = held
        for columns, weight_NH in student.column_blocks() if len(student.scaled_RH) else ():
            for unit_RH, grad_RV in zip(unit_URH[:, rows], grad_URV, strict=False):
                unit_RH += matmul_nt(grad_RV[:, columns], weight_NH.T)
    return concatenate(pieces), unit_URH.mul_(student.scale)


def _moments_to_gradients(views: Views, part: Part, share_CR: Tensor) -> Moments:
    """The statistics of a part, whose first logits become the gradients of products of `units`."""
    logit_CRV = part[1]
    cap_slope_RV = views.heads[0].cap_slope(logit_CRV[0])
    block, moments = _part_moments(views, part, share_CR, with_kl=False, with_loss=True)
    assert moments.contrast is not None
    grads = units.logit_gradients(block, moments.contrast, views.options)
    # In the place of log-probs that nothing reads any more.
    for grad_RV, place_RV in zip(grads, logit_CRV, strict=False):
        place_RV.copy_(grad_RV if cap_slope_RV is None else grad_RV.mul_(cap_slope_RV))
    return moments


def _part_moments(
    views: Views, part: Part, share_CR: Tensor, *, with_kl: bool, with_loss: bool
) -> tuple[Block, Moments]:
    """Log-probs of a part, in the place of its logits, and its statistics."""
    rows, logit_CRV, softmax = part
    contrast, shard = views.options.contrast, views.options.shard
    block = block_of(views, rows, slice(0, views.num_columns), logit_CRV, softmax)
    kl_2CR = _divergences(block) if with_kl else block.zeros(2, 0)
    sums = None
    if contrast is not None:
        if contrast.is_mixed:
            block, log_mass_R = block.with_mean_of(
                contrast.negatives, share_CR[:, rows]
            ).normalised_mean()
            softmax = with_mean(softmax, log_mass_R)
        sums = SUMS[views.options.divergence].of(
            block.restricted(), contrast, complete=shard.group is not None, with_loss=with_loss
        )
    return block, Moments(softmax, kl_2CR, sums)


def log_tilted_mass(
    views: Views, softmax: LocalStats, alpha_R: Tensor, controller_R: Tensor
) -> Tensor:
    """[R] float64: log sum_v q_b e^(w r). Another pass, with a MAX and a SUM all-reduce."""
    contrast = views.options.contrast
    assert contrast is not None
    pieces = []
    for rows, logit_CRV, _ in _parts(views):
        block = whole_block_of(
            views, rows, slice(0, views.num_columns), logit_CRV, softmax[:, rows]
        )
        tilted_RV = tilted(block, contrast, alpha_R[rows], controller_R[rows])
        pieces.append(_softmax_of(tilted_RV))
    return log_mass(reduce(concatenate_softmax(pieces), views.options.shard.group))


def block_of(
    views: Views, rows: slice, columns: slice, logit_CRN: Tensor, softmax: LocalStats
) -> Block:
    """Log-probs under the softmaxes given, on the support; the logits are overwritten."""
    kept_RN = kept(views, rows, columns, logit_CRN)
    return Block.of(logit_CRN, softmax.max_T, softmax.sum_T, kept_RN)


def whole_block_of(
    views: Views, rows: slice, columns: slice, logit_CRN: Tensor, softmax: LocalStats
) -> Block:
    """The same under the softmaxes over the whole vocabulary, with the mean of the negatives."""
    block, contrast = block_of(views, rows, columns, logit_CRN, softmax), views.options.contrast
    if contrast is None or not contrast.is_mixed:
        return block
    return block.with_mean_of(contrast.negatives, torch.zeros_like(softmax.max_T))


def _parts(views: Views) -> Iterator[Part]:
    """All rows, in parts."""
    for held in views.logits():
        yield from _parts_of(views, held)


def _parts_of(views: Views, held: Part) -> Iterator[Part]:
    """Row ranges small enough for the cache, of a range whose logits are held."""
    held_rows, held_CRV, held_softmax = held
    for part in views.parts(held_rows):
        rows = slice(held_rows.start + part.start, held_rows.start + part.stop)
        yield rows, held_CRV[:, part], held_softmax[:, part]


def _log_shares(views: Views) -> Tensor:
    """[C, R]: log of the part that each context's softmax over all columns has in ours.

    Only a mean of several contexts needs it before their statistics are merged: with a group that
    costs another pass and a MAX and a SUM all-reduce.
    """
    contrast, group = views.options.contrast, views.options.shard.group
    if contrast is None or not contrast.is_mixed or group is None:
        return views.heads[0].scaled_RH.new_zeros(len(views.heads), len(views.target_R))
    local = concatenate_softmax([softmax for _, _, softmax in views.logits()])
    return (log_mass(local) - log_mass(reduce(local, group))).to(local.max_T.dtype)


def _divergences(block: Block) -> Tensor:
    """[2, C, R]: KL(context || student) and KL(student || context)."""
    kl_2CR = block.zeros(2, block.num_contexts)
    for context in range(1, block.num_contexts):
        log_ratio_RV = block.log_PRV[context] - block.log_PRV[0]
        kl_2CR[0, context] = block.sum(block.prob_PRV[context] * log_ratio_RV)
        kl_2CR[1, context] = -block.sum(log_ratio_RV.mul_(block.prob_PRV[0]))
    return kl_2CR


def _softmax_of(logit_RV: Tensor) -> LocalStats:
    max_R = logit_RV.new_full(logit_RV.shape[:1], LOWEST)
    if logit_RV.shape[1]:
        max_R = logit_RV.amax(-1).clamp_min(LOWEST)
    sum_R = (logit_RV - max_R[:, None]).exp().sum(-1)
    zero_R = torch.zeros_like(sum_R)
    return LocalStats(max_R, sum_R, zero_R, zero_R, zero_R.bool())
