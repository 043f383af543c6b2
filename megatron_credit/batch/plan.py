"""Which sequences share a micro-batch, and which data rank gets it."""

import heapq
from collections.abc import Sequence

Bin = tuple[int, ...]
"""Indices of the sequences of one micro-batch; empty: a dummy that only keeps ranks in step."""


def plan_microbatches(
    lengths_N: Sequence[int], *, max_tokens: int, num_ranks: int, multiple_of: int = 1
) -> list[list[Bin]]:
    """For each data rank its micro-batches: every sequence exactly once, token counts balanced.

    Every rank gets the same number of micro-batches, a multiple of `multiple_of` (the interleaved
    pipeline schedule needs the number of stages) and the smallest that the packing rule can fit.
    A micro-batch holds at most `max_tokens`, except that a longer sequence gets one of its own:
    nothing is ever cut. `lengths_N` are the lengths as packed, padding included. Deterministic:
    ranks that hold the same lengths make the same plan.
    """
    if max_tokens < 1 or num_ranks < 1 or multiple_of < 1:
        raise ValueError(
            f"max_tokens={max_tokens}, num_ranks={num_ranks} and multiple_of={multiple_of} "
            "must be positive"
        )
    longest_first = sorted(range(len(lengths_N)), key=lambda i: (-lengths_N[i], i))
    # A sequence above the bound fills a micro-batch, so it counts as exactly one.
    need = sum(min(length, max_tokens) for length in lengths_N)
    step = num_ranks * multiple_of
    num_bins = max(1, -(-need // (max_tokens * step))) * step
    while (bins := _fill(longest_first, lengths_N, num_bins, max_tokens)) is None:
        num_bins += step
    return _deal(bins, lengths_N, num_ranks)


def _fill(
    longest_first: Sequence[int], lengths_N: Sequence[int], num_bins: int, max_tokens: int
) -> list[Bin] | None:
    """Puts each sequence into the emptiest bin; None where one does not fit there."""
    emptiest = [(0, number) for number in range(num_bins)]
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for index in longest_first:
        tokens, number = heapq.heappop(emptiest)
        if tokens and tokens + lengths_N[index] > max_tokens:
            return None
        bins[number].append(index)
        heapq.heappush(emptiest, (tokens + lengths_N[index], number))
    return [tuple(sorted(members)) for members in bins]


def _deal(bins: list[Bin], lengths_N: Sequence[int], num_ranks: int) -> list[list[Bin]]:
    """Deals the bins, largest first, to the rank with the fewest tokens that still wants one."""
    sizes = [sum(lengths_N[index] for index in members) for members in bins]
    order = sorted(range(len(bins)), key=lambda number: (-sizes[number], number))
    share = len(bins) // num_ranks
    plan: list[list[Bin]] = [[] for _ in range(num_ranks)]
    tokens = [0] * num_ranks
    for number in order:
        rank = min((r for r in range(num_ranks) if len(plan[r]) < share), key=tokens.__getitem__)
        plan[rank].append(bins[number])
        tokens[rank] += sizes[number]
    return plan
