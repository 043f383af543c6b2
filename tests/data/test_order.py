from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_credit.data.order import MAX_PERIOD, Mixture, shuffled, turns_per_period

WEIGHTS = st.lists(st.sampled_from([0.1, 0.25, 1.0, 2.0, 3.0, 7.0, 12.5]), min_size=1, max_size=5)


@pytest.mark.parametrize(
    ("weights", "turns"),
    [
        ([1.0], [1]),
        ([1.0, 1.0], [1, 1]),
        ([0.7, 0.3], [7, 3]),
        ([0.1, 0.2, 0.3], [1, 2, 3]),
        ([10.0, 2.5], [4, 1]),
        ([1e-9, 1.0], [1, MAX_PERIOD]),
    ],
)
def test_turns_are_in_the_proportion_of_the_weights(weights, turns):
    assert turns_per_period(weights) == turns


def test_the_pattern_is_spread_evenly():
    mixture = Mixture([4.0, 1.0])
    assert [mixture.locate(index)[0] for index in range(10)] == [0, 0, 1, 0, 0, 0, 0, 1, 0, 0]
    assert [mixture.locate(index) for index in range(4)] == [(0, 0), (0, 1), (1, 0), (0, 2)]


@settings(max_examples=60, deadline=None)
@given(weights=WEIGHTS, start=st.integers(0, 10**12))
def test_each_source_has_its_share_at_every_moment(weights, start):
    mixture = Mixture(weights)
    drawn = Counter()
    for number in range(300):
        source, count = mixture.locate(number)
        assert count == drawn[source]  # its own prompts follow each other without a gap
        drawn[source] += 1
        share = [(number + 1) * weight / sum(weights) for weight in weights]
        assert all(abs(drawn[k] - share[k]) < len(weights) for k in range(len(weights)))
    one_period = Counter(mixture.locate(start + k)[0] for k in range(mixture.period))
    assert [one_period[k] for k in range(len(weights))] == turns_per_period(weights)


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 700), key=st.text(max_size=5))
def test_shuffled_is_a_permutation(size, key):
    assert sorted(shuffled(place, size, key) for place in range(size)) == list(range(size))


def test_the_permutation_never_changes():
    # These numbers stand for the order of every run there is: to change them breaks its resume.
    order = [shuffled(place, 10, "1/gsm8k/0") for place in range(10)]
    assert order == [0, 8, 9, 4, 3, 7, 1, 2, 6, 5]
    assert shuffled(123_456, 10**9, "1/gsm8k/0") == 915269300


def test_places_are_well_mixed():
    # Where a place goes says nothing about where it was: correlation within 4 sigma of zero.
    size = 4000
    moved = [shuffled(place, size, "mixing") for place in range(size)]
    mean = (size - 1) / 2
    covariance = sum((k - mean) * (moved[k] - mean) for k in range(size))
    assert abs(covariance / sum((k - mean) ** 2 for k in range(size))) < 4 / size**0.5
    neighbours = sum(abs(a - b) for a, b in pairwise(moved)) / (size - 1)
    assert neighbours == pytest.approx(size / 3, rel=0.05)
    first = Counter(shuffled(0, 4, f"1/x/{epoch}") for epoch in range(2000))
    assert all(400 < first[k] < 600 for k in range(4))
