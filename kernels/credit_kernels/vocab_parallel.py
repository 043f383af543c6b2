"""Vocabulary parallelism as a value: which columns a rank holds, and how local statistics merge.

Local statistics are made without communication, merged by one MAX and one SUM all-reduce however
the work was cut into tiles, and finished without communication. The only module that communicates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

LOWEST = -1e30
"""Maximum over no columns: finite, so that differences and products with 0 stay defined."""


@dataclass(frozen=True)
class VocabShard:
    """This rank holds the columns start..stop-1 of a vocabulary of `total`.

    Columns from `total` on are padding and never count; a shard may be all padding, and shards may
    be of unequal size. `group` is the process group whose shards make up the vocabulary; None means
    that this rank holds all of it.
    """

    start: int
    stop: int
    total: int
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop or self.total < 1:
            raise ValueError(
                f"VocabShard(start={self.start}, stop={self.stop}, total={self.total}): expected "
                "0 <= start <= stop and total >= 1"
            )

    @classmethod
    def whole(cls, total: int) -> "VocabShard":
        """All columns on this rank."""
        return cls(0, total, total)

    @property
    def num_rows(self) -> int:
        """Rows of the weight on this rank, padding included."""
        return self.stop - self.start

    @property
    def num_columns(self) -> int:
        """Rows that are columns of the vocabulary."""
        return max(min(self.stop, self.total) - self.start, 0)


class Mergeable(Protocol):
    """Statistics of each token over some columns that follow from those over parts of them."""

    @property
    def max_T(self) -> Tensor:
        """Largest logits over the columns; LOWEST over none."""
        ...

    def relative_to(self, max_T: Tensor) -> Tensor:
        """[S, ...]: numbers that add up over the parts, relative to a maximum over all of them."""
        ...

    def from_parts(self, max_T: Tensor, part_ST: Tensor) -> Self:
        """The statistics over all parts, from their maximum and the sum of the numbers above."""
        ...


Stats = TypeVar("Stats", bound=Mergeable)


@dataclass(frozen=True, eq=False)
class LocalStats:
    """Softmax statistics of each token over this rank's columns, relative to their maximum."""

    max_T: Tensor
    sum_T: Tensor
    """Sum of exp(z - max)."""
    moment_T: Tensor
    """Sum of exp(z - max) (z - max): centred, so that a common offset of the logits is harmless."""
    target_T: Tensor
    """z of the target where it is one of our columns, else 0."""
    owned_T: Tensor
    """bool: the target is one of our columns."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The fields, tokens last."""
        return self.max_T, self.sum_T, self.moment_T, self.target_T, self.owned_T

    def __getitem__(self, index: Any) -> "LocalStats":
        """The statistics of some tokens."""
        return LocalStats(*(tensor[index] for tensor in self.tensors))

    def relative_to(self, max_T: Tensor) -> Tensor:
        """[3, T]: sum, moment and target logit, relative to a maximum over all shards."""
        shift_T = self.max_T - max_T
        scale_T = shift_T.exp()
        return torch.stack(
            [
                self.sum_T * scale_T,
                (self.moment_T + shift_T * self.sum_T) * scale_T,
                torch.where(self.owned_T, self.target_T - max_T, 0.0),
            ]
        )

    def from_parts(self, max_T: Tensor, part_ST: Tensor) -> "LocalStats":
        """The statistics over all shards, one of which has the target."""
        sum_T, moment_T, target_T = part_ST
        return LocalStats(max_T, sum_T, moment_T, target_T + max_T, torch.ones_like(max_T).bool())


@dataclass(frozen=True, eq=False)
class SoftmaxStats:
    """Statistics over the whole vocabulary."""

    max_T: Tensor
    sum_T: Tensor
    """Sum of exp(z - max)."""
    logprob_T: Tensor
    entropy_T: Tensor


def reduce(stats: Stats, group: dist.ProcessGroup | None) -> Stats:
    """The statistics over the columns of all ranks of the group: two all-reduces, or none."""
    if group is None:
        return stats
    max_T = stats.max_T.clone()
    dist.all_reduce(max_T, dist.ReduceOp.MAX, group=group)
    part_ST = stats.relative_to(max_T)
    dist.all_reduce(part_ST, group=group)
    return stats.from_parts(max_T, part_ST)


def merge(shards: Sequence[Stats]) -> Stats:
    """What `reduce` computes, for shards that are all in this process."""
    max_T = torch.stack([stats.max_T for stats in shards]).amax(0)
    part_ST = torch.stack([stats.relative_to(max_T) for stats in shards]).sum(0)
    return shards[0].from_parts(max_T, part_ST)


def concatenate(pieces: Sequence[LocalStats]) -> LocalStats:
    """The statistics of the tokens of all pieces, one after the other."""
    fields = zip(*(piece.tensors for piece in pieces), strict=True)
    return LocalStats(*(torch.cat(field, -1) for field in fields))


def gather(local: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Every rank's tensor, of the shape of ours: one all-gather, or none."""
    if group is None:
        return [local]
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, local.contiguous(), group=group)
    return parts


def finish(stats: LocalStats) -> SoftmaxStats:
    """Log-prob of the target and entropy, in nats, from statistics over the whole vocabulary."""
    log_sum_T = stats.sum_T.log()
    return SoftmaxStats(
        max_T=stats.max_T,
        sum_T=stats.sum_T,
        logprob_T=(stats.target_T - stats.max_T) - log_sum_T,
        entropy_T=log_sum_T - stats.moment_T / stats.sum_T,
    )
