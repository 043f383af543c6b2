"""Passes over the logits of all views that end in local statistics of each token."""

from collections.abc import Iterator

import torch
from torch import Tensor

from credit_kernels.evidence.block import Block
from credit_kernels.evidence.forward import ForwardSums
from credit_kernels.evidence.moments import Moments, concatenate, log_mass, with_mean
from credit_kernels.evidence.reverse import ReverseSums, tilted
from credit_kernels.evidence.support import kept
from credit_kernels.evidence.views import Views
from credit_kernels.vocab_parallel import LOWEST, LocalStats, reduce
from credit_kernels.vocab_parallel import concatenate as concatenate_softmax

SUMS = {"forward": ForwardSums, "reverse": ReverseSums}


def local_moments(views: Views, *, with_kl: bool, with_loss: bool) -> Moments:
    """The statistics over this rank's columns: the contrast's, and KLs and losses if asked for."""
    contrast, shard = views.options.contrast, views.options.shard
    share_CR = _log_shares(views)
    pieces = []
    for rows, logit_CRV, softmax in _parts(views):
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
        pieces.append(Moments(softmax, kl_2CR, sums))
    return concatenate(pieces)


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


def _parts(views: Views) -> Iterator[tuple[slice, Tensor, LocalStats]]:
    """Row ranges small enough for the cache, with their logits and the softmaxes of those."""
    for held_rows, held_CRV, held_softmax in views.logits():
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
