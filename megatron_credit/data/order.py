"""Which prompt comes when: a pure function of the index, the sizes, the weights and the seed."""

import hashlib
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

# Longest period of a mixture; weights that need a longer one are rounded to it.
MAX_PERIOD = 100_000
NUM_ROUNDS = 6


class Mixture:
    """Sources that take turns: in each period every one has exactly its share, evenly spread."""

    def __init__(self, weights: Sequence[float]) -> None:
        turns = turns_per_period(weights)
        # A source's turn t (of n) stands at (t + 1/2) / n of the period.
        source_P = np.repeat(np.arange(len(turns)), turns)
        turn_P = np.concatenate([np.arange(n) for n in turns])
        place_P = (turn_P + 0.5) / np.asarray(turns)[source_P]
        order_P = np.argsort(place_P, kind="stable")
        self._turns = turns
        self._source_P, self._turn_P = source_P[order_P], turn_P[order_P]

    @property
    def period(self) -> int:
        """Prompts after which the pattern repeats."""
        return len(self._source_P)

    def locate(self, index: int) -> tuple[int, int]:
        """The source of prompt `index`, and how many prompts of that source came before."""
        period, place = divmod(index, self.period)
        source = int(self._source_P[place])
        return source, period * self._turns[source] + int(self._turn_P[place])


def turns_per_period(weights: Sequence[float]) -> list[int]:
    """The smallest whole numbers in the proportion of the weights, as far as MAX_PERIOD allows.

    Each is at least 1. The weights are taken as they are written: 0.1 is one tenth.
    """
    exact = [Fraction(repr(weight)) for weight in weights]
    total = sum(exact)
    shares = [weight / total for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= MAX_PERIOD:
        return [int(share * period) for share in shares]
    return [max(1, round(share * MAX_PERIOD)) for share in shares]


def shuffled(place: int, size: int, key: str) -> int:
    """Where `place` goes in a permutation of range(size) that `key` chooses.

    A Feistel network over the next power of four, walked until it lands below `size`: it needs no
    table, and unlike numpy's generators it is the same in every version.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    while True:
        place = _feistel(place, half, key)
        if place < size:
            return place


def _feistel(value: int, half: int, key: str) -> int:
    """A permutation of the numbers with 2 * half bits."""
    mask = (1 << half) - 1
    left, right = value >> half, value & mask
    for number in range(NUM_ROUNDS):
        mixed = hashlib.blake2b(f"{key}/{number}/{right}".encode(), digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(mixed, "little") & mask)
    return left << half | right


