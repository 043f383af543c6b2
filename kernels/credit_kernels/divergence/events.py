"""The divergence over the student's most likely tokens and, as one event, all others.

Shape letters: K tokens of the support, J candidates for it, X events: the support and the tail.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from credit_kernels.divergence.jsd import divergence, pull
from credit_kernels.evidence.views import Views
from credit_kernels.logprob.head import exp_
from credit_kernels.vocab_parallel import LOWEST, VocabShard, gather

SENT_NUMBERS = 2**20
"""8 MiB in float64: what a rank gives into one all-gather."""


@dataclass(frozen=True, eq=False)
class Events:
    """What the gradient needs of each row when its support is known."""

    column_RK: Tensor
    """int64: the support, columns of the whole vocabulary."""
    pull_RX: Tensor
    """Gradient of the divergence in the logits of the events."""
    tail_R: Tensor
    """Log of the sum of exp(z) over the student's tail, rounded to the computing type."""
    rest_R: Tensor
    """exp() of what the rounding took from it."""

    @classmethod
    def of(cls, views: Views, beta: float, top_k: int) -> tuple[Tensor, "Events"]:
        """[R] float64 divergences, and what their gradient needs."""
        candidates, shard = Candidates.of(views, top_k), views.options.shard
        found = [_finished(part, beta, top_k) for part in candidates.merged(shard)]
        divergence_R, column_RK, pull_RX, exact_R = (
            torch.cat(pieces) for pieces in zip(*found, strict=True)
        )
        compute = views.heads[0].scaled_RH.dtype
        tail_R = exact_R.to(compute)
        rest_R = (exact_R - tail_R).exp().to(compute)
        return divergence_R.clamp_min(0), cls(column_RK, pull_RX.to(compute), tail_R, rest_R)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The fields."""
        return self.column_RK, self.pull_RX, self.tail_R, self.rest_R

    def product_gradient(
        self,
        views: Views,
        beta: float,
        grad_R: Tensor,
        rows: slice,
        columns: slice,
        weight_NH: Tensor,
    ) -> Tensor:
        """Gradient of the student's scaled @ weight.T in one tile; the teacher is not read again.

        Every token of the tail has its share in the pull on the tail; not p times a quotient of
        probabilities, which have no bound.
        """
        head = views.heads[0]
        tile_RN = head.logits(rows, weight_NH)
        cap_slope_RN = head.cap_slope(tile_RN)
        pull_RX = self.pull_RX[rows] * grad_R[rows, None]
        factor_R = pull_RX[:, -1] / self.rest_R[rows]
        # Tokens of the support, far more likely than the tail, are finite until they are replaced.
        tile_RN.sub_(self.tail_R[rows, None]).clamp_(max=1.0)
        exp_(tile_RN).mul_(factor_R[:, None])
        place_RK = self.column_RK[rows] - (head.start + columns.start)
        owned_RK = (place_RK >= 0) & (place_RK < columns.stop - columns.start)
        place_RK = place_RK.where(owned_RK, 0)
        change_RK = pull_RX[:, :-1] - tile_RN.gather(1, place_RK)
        tile_RN.scatter_add_(1, place_RK, change_RK.where(owned_RK, 0))
        return tile_RN if cap_slope_RN is None else tile_RN.mul_(cap_slope_RN)


@dataclass(frozen=True, eq=False)
class Candidates:
    """Tokens among which the support is, with their logits; all float64, and so exact."""

    logit_2RJ: Tensor
    """Minus infinity where a shard has too few columns."""
    column_RJ: Tensor
    log_rest_2RS: Tensor
    """Log of the sum of exp(z) over all other columns of each of S shards."""

    @classmethod
    def of(cls, views: Views, top_k: int) -> "Candidates":
        """This rank's most likely tokens."""
        found = []
        for rows, held_2RV, _ in views.logits():
            for part in views.parts(rows):
                found.append(_largest_of(held_2RV[:, part], top_k, views.options.shard))
        return cls(*(torch.cat(pieces, -2) for pieces in zip(*found, strict=True)))

    def merged(self, shard: VocabShard) -> Iterator["Candidates"]:
        """Those of all ranks, some rows at a time, ascending in columns."""
        packed_RN = torch.cat([*self.logit_2RJ, self.column_RJ, *self.log_rest_2RS], -1)
        num_rows, width = packed_RN.shape
        # The same on every rank, whatever its columns: all take part in each all-gather.
        step = max(SENT_NUMBERS // width, 1)
        for at in range(0, max(num_rows, 1), step):
            parts = gather(packed_RN[at : at + step], shard.group)
            packed_RSN = torch.stack(parts, 1)
            # All J, then all S, of each number.
            sizes = [self.column_RJ.shape[1]] * 3 + [1, 1]
            student_RJ, teacher_RJ, column_RJ, *log_rests = (
                part.flatten(1) for part in packed_RSN.split(sizes, -1)
            )
            column_RJ, order_RJ = column_RJ.sort(-1)
            logit_2RJ = torch.stack(
                [student_RJ.gather(1, order_RJ), teacher_RJ.gather(1, order_RJ)]
            )
            yield Candidates(logit_2RJ, column_RJ, torch.stack(log_rests))


def first_largest(value_RN: Tensor, count: int) -> Tensor:
    """[R, count]: places of the largest values, the first ones among equals."""
    if count == value_RN.shape[1]:
        return torch.arange(count, device=value_RN.device).expand_as(value_RN)
    largest = value_RN.topk(count + 1, -1)
    place_RK = largest.indices[:, :count]
    # topk promises nothing about which of several equal values it takes.
    tied_R = (largest.values[:, -1] == largest.values[:, -2]).nonzero()[:, 0]
    sorted_RN = value_RN[tied_R].sort(dim=-1, descending=True, stable=True)
    return place_RK.index_copy(0, tied_R, sorted_RN.indices[:, :count])


def _largest_of(logit_2RV: Tensor, top_k: int, shard: VocabShard) -> tuple[Tensor, Tensor, Tensor]:
    """The fields of `Candidates`; the logits are overwritten."""
    here = min(top_k, logit_2RV.shape[-1])
    place_RK = first_largest(logit_2RV[0], here)
    place_2RK = place_RK.expand(2, -1, -1)
    shape = (*logit_2RV.shape[:2], top_k)
    logit_2RJ = logit_2RV.new_full(shape, -torch.inf, dtype=torch.float64)
    logit_2RJ[..., :here] = logit_2RV.gather(-1, place_2RK)
    column_RJ = logit_2RJ.new_full(shape[1:], shard.total)
    column_RJ[:, :here] = place_RK + shard.start
    return logit_2RJ, column_RJ, _log_mass(logit_2RV.scatter_(-1, place_2RK, -torch.inf))


def _log_mass(logit_2RV: Tensor) -> Tensor:
    """[2, R, 1] float64: log of the sum of exp(z); the logits are overwritten."""
    if logit_2RV.shape[-1] == 0:
        return logit_2RV.new_full((*logit_2RV.shape[:-1], 1), -torch.inf, dtype=torch.float64)
    max_2R1 = logit_2RV.amax(-1, keepdim=True).clamp_min(LOWEST)
    sum_2R1 = exp_(logit_2RV.sub_(max_2R1)).sum(-1, keepdim=True)
    return sum_2R1.double().log() + max_2R1


def _finished(candidates: Candidates, beta: float, top_k: int) -> tuple[Tensor, ...]:
    """Divergence, support, the pull on its events, and log of the student's tail; float64."""
    logit_2RJ = candidates.logit_2RJ
    place_RK = first_largest(logit_2RJ[0], top_k)
    place_2RK = place_RK.expand(2, -1, -1)
    left_2RJ = logit_2RJ.scatter(-1, place_2RK, -torch.inf)
    tail_2R1 = torch.cat([left_2RJ, candidates.log_rest_2RS], -1).logsumexp(-1, keepdim=True)
    logit_2RX = torch.cat([logit_2RJ.gather(-1, place_2RK), tail_2R1], -1)
    log_2RX = logit_2RX.log_softmax(-1)
    prob_2RX = log_2RX.exp()
    divergence_R, own_R = divergence(log_2RX, prob_2RX, beta)
    pull_RX = pull(log_2RX, prob_2RX, beta, own_R)
    column_RK = candidates.column_RJ.gather(1, place_RK).long()
    return divergence_R, column_RK, pull_RX, tail_2R1[0, :, 0]
