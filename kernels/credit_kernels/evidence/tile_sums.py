"""Sums over columns in every context, tile by tile, under given softmaxes: device code.

Slots are contexts and, last, the mean of several negatives where there is one; slot 0 is the
student. The three variables of a contrast are task, nuisance and q0, for the reverse divergence the
tangents of task and nuisance and p, whatever its kind: the host takes what its kind needs. The mean
and squares of the third are made where tangents are recentred or shards will merge. Variables are
centred on their means so far before they are squared: nothing large cancels. PLAN is a `plan.Plan`.
"""

# Triton knows no starred tuples.
# ruff: noqa: RUF005, PLR0915

from typing import NamedTuple

import triton
import triton.language as tl

from credit_kernels.evidence.tile_logits import log_probability, probability


class Sums(NamedTuple):
    """Of each row, in the order in which they leave; () for what PLAN does not ask for."""

    kl: tuple
    """KL(context || student) and KL(student || context) of every context but the student."""
    weight: tuple
    """Sum of p."""
    mean: tuple
    """Of the variables under p."""
    square: tuple
    """Sums of p times two variables less their means, 00 01 11 and with the third 02 12 22."""
    mass: tuple
    """Sums of the variables, if they are 0 off a support."""
    cross: tuple
    """Sums of variable times log p."""
    reference: tuple
    """Sum of q0 (log q0 - log p), reverse: of p (log p - log q0)."""
    centre: tuple
    """What the tangents are centred on."""


@triton.jit
def filled(COUNT: tl.constexpr, ROWS: tl.constexpr):
    """A tuple of zeros."""
    rows = ()
    for _ in tl.static_range(COUNT):
        rows = rows + (tl.zeros((ROWS,), tl.float32),)
    return rows


@triton.jit
def no_sums(PLAN: tl.constexpr, ROWS: tl.constexpr):
    """Over no column."""
    SIZES: tl.constexpr = PLAN.sizes
    return Sums(
        filled(SIZES[0], ROWS),
        filled(SIZES[1], ROWS),
        filled(SIZES[2], ROWS),
        filled(SIZES[3], ROWS),
        filled(SIZES[4], ROWS),
        filled(SIZES[5], ROWS),
        filled(SIZES[6], ROWS),
        filled(SIZES[7], ROWS),
    )


@triton.jit
def add_tile(sums, tiles, kept, numbers_ptr, stride_n, row, kept_row, PLAN: tl.constexpr):
    """With the columns of a tile of logits in all slots, on a support.

    Slot after slot, so that few tiles of intermediate values are alive at once.
    """
    SLOTS: tl.constexpr = PLAN.slots
    kl = ()
    log_student = log_probability(tiles, 0, numbers_ptr, stride_n, row, kept_row, PLAN)
    student = probability(tiles, 0, numbers_ptr, stride_n, row, kept_row, PLAN)
    log = (log_student,)
    prob = (student,)
    for slot in tl.static_range(1, SLOTS):
        log_tile = log_probability(tiles, slot, numbers_ptr, stride_n, row, kept_row, PLAN)
        prob_tile = probability(tiles, slot, numbers_ptr, stride_n, row, kept_row, PLAN)
        if PLAN.kl and slot < PLAN.contexts:
            ratio = log_tile - log_student
            kl = kl + (
                sums.kl[2 * slot - 2] + tl.sum(prob_tile * ratio, 1),
                sums.kl[2 * slot - 1] - tl.sum(student * ratio, 1),
            )
        log = log + (log_tile,)
        prob = prob + (prob_tile,)
    if not PLAN.contrast:
        return Sums(kl, (), (), (), (), (), (), ())
    weight = sums.weight[0] + tl.sum(student, 1)
    inverse = 1.0 / tl.maximum(weight, 1e-37)
    before = sums.mean
    square = sums.square
    centre = ()
    reference = ()
    if PLAN.reverse:
        if PLAN.loss:
            reference = (sums.reference[0] + reference_of(student, log, kept, PLAN),)
        variables, centre = tangents(sums, student, log, kept, inverse, PLAN)
        task_shift = sums.centre[0] - centre[0]
        nuisance_shift = sums.centre[1] - centre[1]
        before, square = recentred(before, square, task_shift, nuisance_shift)
    else:
        if PLAN.loss:
            reference = (sums.reference[0] - reference_of(prob[PLAN.free], log, kept, PLAN),)
        variables = differences(prob, kept, PLAN)
    cross = ()
    if PLAN.loss and not PLAN.reverse:
        of_tile = row_sums(
            variables[0] * log_student, variables[1] * log_student, variables[2] * log_student
        )
        cross = plus(sums.cross, of_tile)
    mean, square = spread(before, square, sums.weight[0], student, variables, inverse, PLAN)
    mass = ()
    if PLAN.support:
        old = sums.mass
        if PLAN.reverse:
            old = (old[0] + task_shift * old[2], old[1] + nuisance_shift * old[2], old[2])
        mass = plus(old, row_sums(variables[0], variables[1], variables[2]))
    return Sums(kl, (weight,), mean, square, mass, cross, reference, centre)


@triton.jit
def reference_of(weight, log, kept, PLAN: tl.constexpr):
    """Sums of weight times log p less log q0, on the support."""
    apart = weight * (log[0] - log[PLAN.free])
    if PLAN.support:
        apart = tl.where(kept, apart, 0.0)
    return tl.sum(apart, 1)


@triton.jit
def differences(prob, kept, PLAN: tl.constexpr):
    """Task, nuisance and q0 on the support."""
    task = prob[PLAN.positive] - prob[PLAN.negative]
    nuisance = 0.5 * (prob[PLAN.positive] + prob[PLAN.negative]) - prob[PLAN.free]
    free = prob[PLAN.free]
    if PLAN.support:
        task = tl.where(kept, task, 0.0)
        nuisance = tl.where(kept, nuisance, 0.0)
        free = tl.where(kept, free, 0.0)
    return task, nuisance, free


@triton.jit
def tangents(sums, prob, log, kept, inverse, PLAN: tl.constexpr):
    """p (r - centre) of task and nuisance and p, on the support; and centres, near E_p[r]."""
    if PLAN.support:
        prob = tl.where(kept, prob, 0.0)
    task = log[PLAN.positive] - log[PLAN.negative] - sums.centre[0][:, None]
    nuisance = 0.5 * (log[PLAN.positive] + log[PLAN.negative]) - log[PLAN.free]
    nuisance -= sums.centre[1][:, None]
    task_move = tl.sum(prob * task, 1) * inverse
    nuisance_move = tl.sum(prob * nuisance, 1) * inverse
    variables = (
        prob * (task - task_move[:, None]),
        prob * (nuisance - nuisance_move[:, None]),
        prob,
    )
    return variables, (sums.centre[0] + task_move, sums.centre[1] + nuisance_move)


@triton.jit
def recentred(mean, square, task_shift, nuisance_shift):
    """For tangents that gain shift times p."""
    mean = (mean[0] + task_shift * mean[2], mean[1] + nuisance_shift * mean[2], mean[2])
    task_p = square[3] + task_shift * square[5]
    nuisance_p = square[4] + nuisance_shift * square[5]
    square = (
        square[0] + task_shift * (square[3] + task_p),
        square[1] + nuisance_shift * square[3] + task_shift * nuisance_p,
        square[2] + nuisance_shift * (square[4] + nuisance_p),
        task_p,
        nuisance_p,
        square[5],
    )
    return mean, square


@triton.jit
def spread(mean, square, weight, prob, variables, inverse, PLAN: tl.constexpr):
    """Means and centred squares with those of the columns before, of so much weight."""
    shrink = weight * inverse
    mean_0 = shrink * mean[0] + inverse * tl.sum(prob * variables[0], 1)
    mean_1 = shrink * mean[1] + inverse * tl.sum(prob * variables[1], 1)
    x = variables[0] - mean_0[:, None]
    y = variables[1] - mean_1[:, None]
    px = prob * x
    a = mean[0] - mean_0
    b = mean[1] - mean_1
    new_mean = (mean_0, mean_1)
    new_square = (
        square[0] + weight * a * a + tl.sum(px * x, 1),
        square[1] + weight * a * b + tl.sum(px * y, 1),
        square[2] + weight * b * b + tl.sum(prob * y * y, 1),
    )
    if PLAN.third:
        mean_2 = shrink * mean[2] + inverse * tl.sum(prob * variables[2], 1)
        z = variables[2] - mean_2[:, None]
        pz = prob * z
        c = mean[2] - mean_2
        new_mean = new_mean + (mean_2,)
        new_square = new_square + (
            square[3] + weight * a * c + tl.sum(pz * x, 1),
            square[4] + weight * b * c + tl.sum(pz * y, 1),
            square[5] + weight * c * c + tl.sum(pz * z, 1),
        )
    return new_mean, new_square


@triton.jit
def row_sums(x, y, z):
    return tl.sum(x, 1), tl.sum(y, 1), tl.sum(z, 1)


@triton.jit
def plus(v, w):
    return v[0] + w[0], v[1] + w[1], v[2] + w[2]
