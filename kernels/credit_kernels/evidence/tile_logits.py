"""Element-wise parts of the Triton programs of the evidence operations: device code.

Numbers of a row, one [R] array each, stride_n apart, in the order: thresholds of the named
contexts, maxima and log sums of the negatives, maxima and sums of all slots, coefficients of all
slots, a coefficient of p, a constant. `tile_sums` says what slots and PLAN are.
"""

# Triton knows no starred tuples.
# ruff: noqa: RUF005

import triton
import triton.language as tl

from credit_kernels.logprob.kernels import cap_slope
from credit_kernels.tile_math import LOG2E, LOWEST, soft_capped


@triton.jit
def number(numbers_ptr, INDEX: tl.constexpr, stride_n, row, kept_row):
    """One of the row's numbers."""
    return tl.load(numbers_ptr + INDEX * stride_n + row, mask=kept_row, other=0.0)


@triton.jit
def logits_of(products, scale, softcap, PLAN: tl.constexpr, CAPPED: tl.constexpr):
    """Logits of every context."""
    CONTEXTS: tl.constexpr = PLAN.contexts
    tiles = ()
    for context in tl.static_range(CONTEXTS):
        tile = products[context]
        if CAPPED:
            tile = soft_capped(tile, softcap)
        tiles = tiles + (tile * scale,)
    return tiles


@triton.jit
def mean_of_negatives(tiles, numbers_ptr, stride_n, row, kept_row, PLAN: tl.constexpr):
    """Log of the mean of the negatives' probabilities over the whole vocabulary."""
    FIRST: tl.constexpr = len(PLAN.named)
    COUNT: tl.constexpr = len(PLAN.negatives)
    logs = ()
    for k in tl.static_range(COUNT):
        maximum = number(numbers_ptr, FIRST + k, stride_n, row, kept_row)
        log_sum = number(numbers_ptr, FIRST + COUNT + k, stride_n, row, kept_row)
        shifted = tiles[PLAN.negatives[k]] - maximum[:, None]
        logs = logs + (shifted - log_sum[:, None],)
    largest = logs[0]
    for k in tl.static_range(1, COUNT):
        largest = tl.maximum(largest, logs[k])
    total = tl.exp2((logs[0] - largest) * LOG2E)
    for k in tl.static_range(1, COUNT):
        total += tl.exp2((logs[k] - largest) * LOG2E)
    return largest + tl.log(total * (1.0 / COUNT))


@triton.jit
def support(products, column, target, numbers_ptr, stride_n, row, kept_row, PLAN: tl.constexpr):
    """Columns whose product reaches a threshold, and the sampled token."""
    COUNT: tl.constexpr = len(PLAN.named)
    kept = column[None, :] == target[:, None]
    for k in tl.static_range(COUNT):
        threshold = number(numbers_ptr, k, stride_n, row, kept_row)
        kept = kept | (products[PLAN.named[k]] >= threshold[:, None])
    return kept


@triton.jit
def masked(tiles, inside, PLAN: tl.constexpr):
    """LOWEST in columns that are not inside."""
    SLOTS: tl.constexpr = PLAN.slots
    result = ()
    for slot in tl.static_range(SLOTS):
        result = result + (tl.where(inside[None, :], tiles[slot], LOWEST),)
    return result


@triton.jit
def sum_of_logs(tiles, numbers_ptr, stride_n, row, kept_row, PLAN: tl.constexpr):
    """Sum over the slots of coefficient times log-prob."""
    SLOTS: tl.constexpr = PLAN.slots
    AT: tl.constexpr = PLAN.softmax_at
    total = tl.zeros_like(tiles[0])
    for slot in tl.static_range(SLOTS):
        coefficient = number(numbers_ptr, AT + 2 * SLOTS + slot, stride_n, row, kept_row)
        log = log_probability(tiles, slot, numbers_ptr, stride_n, row, kept_row, PLAN)
        total += coefficient[:, None] * log
    return total


@triton.jit
def probability(
    tiles, SLOT: tl.constexpr, numbers_ptr, stride_n, row, kept_row, PLAN: tl.constexpr
):
    """Of one slot under the softmax given."""
    maximum = number(numbers_ptr, PLAN.softmax_at + SLOT, stride_n, row, kept_row)
    total = number(numbers_ptr, PLAN.softmax_at + PLAN.slots + SLOT, stride_n, row, kept_row)
    # Not exp(z - log sum): its rounding would be common to all columns of a context.
    inverse = 1.0 / tl.maximum(total, 1e-37)
    return tl.exp2((tiles[SLOT] - maximum[:, None]) * LOG2E) * inverse[:, None]


@triton.jit
def log_probability(
    tiles, SLOT: tl.constexpr, numbers_ptr, stride_n, row, kept_row, PLAN: tl.constexpr
):
    """Its logarithm."""
    maximum = number(numbers_ptr, PLAN.softmax_at + SLOT, stride_n, row, kept_row)
    total = number(numbers_ptr, PLAN.softmax_at + PLAN.slots + SLOT, stride_n, row, kept_row)
    return (tiles[SLOT] - maximum[:, None]) - tl.log(tl.maximum(total, 1e-37))[:, None]


@triton.jit
def logit_gradient(tiles, kept, numbers_ptr, stride_n, row, kept_row, PLAN: tl.constexpr):
    """Gradient of the student's logits, in units of the `function.coefficients`."""
    SLOTS: tl.constexpr = PLAN.slots
    LAST: tl.constexpr = PLAN.softmax_at + 3 * SLOTS
    prob = probability(tiles, 0, numbers_ptr, stride_n, row, kept_row, PLAN)
    own = number(numbers_ptr, LAST, stride_n, row, kept_row)
    if PLAN.reverse:
        total = sum_of_logs(tiles, numbers_ptr, stride_n, row, kept_row, PLAN)
        if PLAN.support:
            constant = number(numbers_ptr, LAST + 1, stride_n, row, kept_row)
            total = tl.where(kept, total + constant[:, None], 0.0)
        return prob * (total + own[:, None])
    total = tl.zeros_like(prob)
    for slot in tl.static_range(SLOTS):
        coefficient = number(
            numbers_ptr, PLAN.softmax_at + 2 * SLOTS + slot, stride_n, row, kept_row
        )
        value = prob
        if slot > 0:
            value = probability(tiles, slot, numbers_ptr, stride_n, row, kept_row, PLAN)
        total += coefficient[:, None] * value
    if PLAN.support:
        total = tl.where(kept, total, 0.0)
    return total + own[:, None] * prob


@triton.jit
def capped_slope(product, softcap):
    """Slope of the softcap at a product."""
    return cap_slope(soft_capped(product, softcap), softcap)
