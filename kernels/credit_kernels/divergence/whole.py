"""The divergence over all columns of the vocabulary."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from credit_kernels.divergence.jsd import divergence, pull
from credit_kernels.evidence.block import Block
from credit_kernels.evidence.passes import local_moments
from credit_kernels.evidence.views import Views
from credit_kernels.vocab_parallel import LocalStats, concatenate, gather, reduce


@dataclass(frozen=True, eq=False)
class Whole:
    """What is known of each row when all of its columns have been seen."""

    max_2R: Tensor
    sum_2R: Tensor
    """Sum of exp(z - max), of student and teacher."""
    own_R: Tensor
    """See `jsd.divergence`."""

    @classmethod
    def of(cls, views: Views, beta: float) -> tuple[Tensor, "Whole"]:
        """[R] float64 divergences, and what their gradient needs."""
        if beta in (0, 1):
            softmax, divergence_R = _extreme(views, int(beta))
            own_R = divergence_R * beta
        else:
            softmax, divergence_R, own_R = _between(views, beta)
        return divergence_R.clamp_min(0), cls(
            softmax.max_T, softmax.sum_T, own_R.to(softmax.max_T.dtype)
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The fields."""
        return self.max_2R, self.sum_2R, self.own_R

    def product_gradient(
        self,
        views: Views,
        beta: float,
        grad_R: Tensor,
        rows: slice,
        columns: slice,
        weight_NH: Tensor,
    ) -> Tensor:
        """Gradient of the student's scaled @ weight.T in one tile, whose logits are made again."""
        weights = views.weights(columns, weight_NH)
        tiles = [
            head.logits(rows, own_NH) for head, own_NH in zip(views.heads, weights, strict=True)
        ]
        cap_slope_RN = views.heads[0].cap_slope(tiles[0])
        block = Block.of(torch.stack(tiles), self.max_2R[:, rows], self.sum_2R[:, rows], None)
        grad_RN = pull(block.log_PRV, block.prob_PRV, beta, self.own_R[rows])
        grad_RN.mul_(grad_R[rows, None])
        return grad_RN if cap_slope_RN is None else grad_RN.mul_(cap_slope_RN)


def _extreme(views: Views, side: int) -> tuple[LocalStats, Tensor]:
    """The softmaxes, and KL(teacher || student) or, for side 1, KL(student || teacher).

    Unlike the divergences from a mixture they merge over shards by shifting.
    """
    local = local_moments(views, with_kl=True, with_loss=False)
    moments = reduce(local, views.options.shard.group)
    return moments.softmax, moments.kl_2CT[side, 1]


def _between(views: Views, beta: float) -> tuple[LocalStats, Tensor, Tensor]:
    """The softmaxes, the divergence and the student's part of it; a pass more with a group."""
    group, whole = views.options.shard.group, None
    if group is not None:
        whole = reduce(concatenate([softmax for _, _, softmax in views.logits()]), group)
    softmaxes, found = [], []
    for rows, logit_2RV, local in _parts(views):
        softmax = local if whole is None else whole[:, rows]
        block = Block.of(logit_2RV, softmax.max_T, softmax.sum_T, None)
        softmaxes.append(softmax)
        found.append(torch.stack(divergence(block.log_PRV, block.prob_PRV, beta)))
    divergence_R, own_R = torch.stack(gather(torch.cat(found, -1), group)).sum(0)
    return concatenate(softmaxes), divergence_R, own_R


def _parts(views: Views) -> Iterator[tuple[slice, Tensor, LocalStats]]:
    """Row ranges small enough for the cache, with their logits and the softmaxes of those."""
    for held, held_2RV, softmax in views.logits():
        for part in views.parts(held):
            rows = slice(held.start + part.start, held.start + part.stop)
            yield rows, held_2RV[:, part], softmax[:, part]
